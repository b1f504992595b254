"""Model folders of transformers with random weights, and their ControlNets, for measuring speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxControlNetModel,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel

from bottega.miniature import WEIGHTS
from bottega.model_files.presets import PRESET_FILE, Preset, preset_text
from load.bench.bench_model import BenchShape, bench_vae, seeded, silence, text_config
from tests.samples.family_models import t5_tokenizer

_CHANNELS = 16
# Channels of a head: of Stable Diffusion 3, and of Flux.1 by the axes of its positions.
_HEAD, _AXES = 64, (16, 56, 56)
_TEXT = BenchShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The size of a bench model, of Stable Diffusion 3's topology or, if it has single blocks, of Flux.1 schnell's.

    A guided step takes about a second with one thread, half of it with a ControlNet of half as many blocks. The prompt
    has as many tokens as in Stable Diffusion 3, T5's being zeros, or as in Flux.1 schnell.
    """

    heads: int = 6
    """Heads of 64 channels each, or of 128."""
    blocks: int = 12
    """Joint blocks of the model."""
    single_blocks: int = 0
    """Blocks of Flux.1 with the same layers for the tokens of picture and prompt."""
    control_blocks: int = 6
    """Joint blocks of the ControlNet, half as many as in those that are published."""
    control_single_blocks: int = 0
    """Single blocks of the ControlNet."""
    sample_size: int = 32
    """Latent elements a side."""
    latent_scale: int = 8
    """Pixels a side of a latent element."""

    @property
    def side(self) -> int:
        """Pixels a side of a picture."""
        return self.sample_size * self.latent_scale

    @property
    def config(self) -> dict[str, Any]:
        """Arguments that the transformer and the ControlNet have in common."""
        if self.single_blocks:
            return {
                "in_channels": 4 * _CHANNELS,
                "attention_head_dim": sum(_AXES),
                "num_attention_heads": self.heads,
                "joint_attention_dim": _TEXT.text_width,
                "pooled_projection_dim": _TEXT.text_width,
                "axes_dims_rope": _AXES,
            }
        return {
            "sample_size": self.sample_size,
            "in_channels": _CHANNELS,
            "out_channels": _CHANNELS,
            "attention_head_dim": _HEAD,
            "num_attention_heads": self.heads,
            "joint_attention_dim": 2 * _TEXT.text_width,
            "caption_projection_dim": _HEAD * self.heads,
            "pooled_projection_dim": 2 * _TEXT.text_width,
            "pos_embed_max_size": self.sample_size,
        }

    def for_run(self, *, smallest: bool) -> TransformerShape:
        """Return this shape; for a smallest run, one with as few weights as there may be."""
        if not smallest:
            return self
        model, net = min(1, self.single_blocks), min(1, self.control_single_blocks)
        return replace(self, heads=1, blocks=2, single_blocks=model, control_blocks=1, control_single_blocks=net)


def write_transformer_model(folder: Path, shape: TransformerShape, seed: int = 0) -> None:
    """Write a random model in half precision into a folder that does not exist. It is loaded in float32."""
    silence()
    with seeded(seed):
        vae = bench_vae(
            replace(_TEXT, sample_size=shape.sample_size),
            latent_channels=_CHANNELS,
            shift_factor=0.06,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        pipeline = _flux(shape, vae) if shape.single_blocks else _stable_diffusion_3(shape, vae)
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    (folder / PRESET_FILE).write_text(preset_text(Preset(dtype="float32")))


def _stable_diffusion_3(shape: TransformerShape, vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    tokenizers = [CLIPTokenizer.from_pretrained(WEIGHTS / name) for name in ("tokenizer", "tokenizer_2")]
    encoders = [
        CLIPTextModelWithProjection(text_config(_TEXT, tokenizer, activation))
        for tokenizer, activation in zip(tokenizers, ("quick_gelu", "gelu"), strict=True)
    ]
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(num_layers=shape.blocks, **shape.config),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizers[0],
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizers[1],
        text_encoder_3=None,
        tokenizer_3=None,
    )


def _flux(shape: TransformerShape, vae: AutoencoderKL) -> FluxPipeline:
    tokenizer, second = CLIPTokenizer.from_pretrained(WEIGHTS / "tokenizer"), t5_tokenizer()
    width = _TEXT.text_width
    return FluxPipeline(
        transformer=FluxTransformer2DModel(
            num_layers=shape.blocks, num_single_layers=shape.single_blocks, **shape.config
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=vae,
        text_encoder=CLIPTextModel(text_config(_TEXT, tokenizer, "quick_gelu")),
        tokenizer=tokenizer,
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=len(second), d_model=width, d_ff=2 * width, d_kv=width // 2, num_layers=1, num_heads=2)
        ),
        tokenizer_2=second,
    )


def write_transformer_controlnet(folder: Path, shape: TransformerShape, *, seed: int) -> Path:
    """Write a ControlNet with random residuals, in half precision; return its folder."""
    with seeded(seed):
        network: Any
        if shape.single_blocks:
            singles = shape.control_single_blocks
            network = FluxControlNetModel(num_layers=shape.control_blocks, num_single_layers=singles, **shape.config)
            zeros = (*network.controlnet_blocks, *network.controlnet_single_blocks, network.controlnet_x_embedder)
        else:
            network = SD3ControlNetModel(num_layers=shape.control_blocks, **shape.config)
            zeros = (*network.controlnet_blocks, network.pos_embed_input.proj)
        for layer in zeros:
            nn.init.normal_(layer.weight, std=0.01)
    network.half().save_pretrained(folder, safe_serialization=True)
    return folder
