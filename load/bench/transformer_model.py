"""A model folder of Stable Diffusion 3's topology with random weights, and its ControlNets, for measuring speed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    SD3ControlNetModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer

from bottega.miniature import WEIGHTS
from bottega.model_files.presets import PRESET_FILE, Preset, preset_text
from load.bench.bench_model import BenchShape, bench_vae, seeded, silence, text_config

_CHANNELS = 16
_HEAD = 64
_TEXT = BenchShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """The size of a bench model.

    A guided step takes about a second with one thread, half of it with a ControlNet of half as many blocks. The prompt
    has as many tokens as in Stable Diffusion 3, T5's being zeros.
    """

    heads: int = 6
    """Heads of 64 channels each."""
    blocks: int = 12
    """Joint blocks of the model."""
    control_blocks: int = 6
    """Joint blocks of the ControlNet, half as many as in those that are published."""
    sample_size: int = 32
    """Latent elements a side."""
    latent_scale: int = 8
    """Pixels a side of a latent element."""

    @property
    def side(self) -> int:
        """Pixels a side of a picture."""
        return self.sample_size * self.latent_scale

    @property
    def config(self) -> dict[str, int]:
        """Arguments that the transformer and the ControlNet have in common."""
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
        return replace(self, heads=1, blocks=2, control_blocks=1) if smallest else self


def write_transformer_model(folder: Path, shape: TransformerShape, seed: int = 0) -> None:
    """Write a random model in half precision into a folder that does not exist. It is loaded in float32."""
    silence()
    tokenizers = [CLIPTokenizer.from_pretrained(WEIGHTS / name) for name in ("tokenizer", "tokenizer_2")]
    with seeded(seed):
        encoders = [
            CLIPTextModelWithProjection(text_config(_TEXT, tokenizer, activation))
            for tokenizer, activation in zip(tokenizers, ("quick_gelu", "gelu"), strict=True)
        ]
        vae = bench_vae(
            replace(_TEXT, sample_size=shape.sample_size),
            latent_channels=_CHANNELS,
            shift_factor=0.06,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        pipeline = StableDiffusion3Pipeline(
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
    pipeline.to(dtype=torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)
    (folder / PRESET_FILE).write_text(preset_text(Preset(dtype="float32")))


def write_transformer_controlnet(folder: Path, shape: TransformerShape, *, seed: int) -> Path:
    """Write a ControlNet with random residuals, in half precision; return its folder."""
    with seeded(seed):
        network = SD3ControlNetModel(num_layers=shape.control_blocks, **shape.config)
        for layer in (*network.controlnet_blocks, network.pos_embed_input.proj):
            nn.init.normal_(layer.weight, std=0.01)
    network.half().save_pretrained(folder, safe_serialization=True)
    return folder
