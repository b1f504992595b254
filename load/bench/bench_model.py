"""A model folder of SDXL's or SD 2.1's topology with random weights, of any width and depth, for measuring speed."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import PIL.Image
import torch
from diffusers import (
    AutoencoderKL,
    ControlNetModel,
    EulerDiscreteScheduler,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from diffusers.utils import logging as diffusers_logging
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from bottega.miniature import WEIGHTS
from bottega.model.weights import DTYPES
from bottega.model_files.presets import PRESET_FILE, Preset, preset_text

_LATENT_CHANNELS = 4
# Channels of the embedding of each of SDXL's six sizes, and how many sizes there are.
_SIZE_CHANNELS, _SIZES = 32, 6
_TEXT_LAYERS, _TEXT_HEADS = 2, 4
_VAE_GROUPS = 8
# Of a ControlNet's embedding of its image; each but the first halves the side.
_CONTROL_CHANNELS = (16, 32, 64, 128)
# Second moment of SiLU(z), z standard normal: what a convolution behind GroupNorm and SiLU sees.
_SILU_MOMENT = 0.355
# Of the decoder's output, so that nearly all pixels lie inside [-1, 1].
_PICTURE_STD = 0.4


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchShape:
    """The size of a bench model.

    The defaults take 100 to 150 ms for a guided step on two CPU cores, and about one step's time for text and decoding.
    """

    family: Literal["sdxl", "sd21"] = "sdxl"
    """Whose topology it has."""
    block_out_channels: tuple[int, ...] = (48, 96, 192)
    """Channels of the UNet's levels, finest first."""
    transformer_layers: tuple[int, ...] = (1, 2)
    """Depth of each level but the one without attention: SDXL's first, or the last of Stable Diffusion 2.1."""
    layers_per_block: int = 2
    """Residual blocks of a level."""
    head_channels: int = 32
    """Channels of one attention head."""
    norm_groups: int = 16
    """Groups of every GroupNorm in the UNet."""
    sample_size: int = 32
    """Latent elements a side."""
    latent_scale: int = 8
    """Pixels a side of a latent element: 4 as the miniature, or 8 as SDXL."""
    vae_channels: int = 16
    """Channels of the VAE's finest level; the others have twice as many."""
    text_width: int = 64
    """Width of each of the two text encoders."""
    dtype: str = "float16"
    """Dtype of the weights in the folder: float16 or float32."""

    @property
    def levels(self) -> int:
        """Levels of the UNet."""
        return len(self.block_out_channels)

    @property
    def side(self) -> int:
        """Pixels a side of a picture."""
        return self.sample_size * self.latent_scale

    def for_run(self, *, smallest: bool) -> BenchShape:
        """Return this shape; for a smallest run, one with the same pictures and as few weights as there may be."""
        if not smallest:
            return self
        return replace(
            self,
            block_out_channels=(16, *[32] * (self.levels - 1)),
            transformer_layers=(1,) * (self.levels - 1),
            layers_per_block=1,
            head_channels=16,
            norm_groups=8,
            vae_channels=8,
            text_width=16,
        )


DEFAULT = BenchShape()


def write_bench_model(folder: Path, shape: BenchShape = DEFAULT, seed: int = 0) -> None:
    """Write a random model into a folder that is empty or does not exist; all of it or nothing.

    The same shape and seed give the same bytes. Raises FileExistsError where something is in the way.
    """
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(f"{folder} is there and not an empty folder; name another, or remove it")
    target = folder.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    silence()
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as partial:
        made = Path(partial) / "model"
        with seeded(seed):
            pipeline = _pipeline(shape)
        pipeline.to(dtype=DTYPES[shape.dtype])
        pipeline.save_pretrained(made, safe_serialization=True)
        if shape.dtype != "float32":  # in which the suite and what it is compared with compute
            (made / PRESET_FILE).write_text(preset_text(Preset(dtype="float32")))
        made.rename(target)


def write_bench_controlnet(model: Path, folder: Path, shape: BenchShape, *, seed: int) -> Path:
    """Write a ControlNet of a bench model's UNet, with random residuals, in half precision; return its folder."""
    unet = UNet2DConditionModel.from_pretrained(model / "unet", use_safetensors=True)
    with seeded(seed):
        net = ControlNetModel.from_unet(
            unet, conditioning_embedding_out_channels=_CONTROL_CHANNELS[: {4: 3, 8: 4}[shape.latent_scale]]
        )
        for convolution in (*net.controlnet_down_blocks, net.controlnet_mid_block):
            nn.init.normal_(convolution.weight, std=0.01)
    net.half().save_pretrained(folder, safe_serialization=True)
    return folder


def write_gradient(file: Path, side: int, *, turns: int = 0) -> Path:
    """Write a control image of so many pixels a side, turned by so many quarters; return the file."""
    image = PIL.Image.linear_gradient("L").resize((side, side)).convert("RGB")
    image.rotate(90 * turns).save(file)
    return file


def silence() -> None:
    """Show no progress bars, and no warnings about a cast that is meant or what Diffusers does itself."""
    warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)
    diffusers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the CPU's generator in the block; torch.manual_seed would reseed devices as well."""
    before = torch.random.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.random.set_rng_state(before)


def _pipeline(shape: BenchShape) -> Any:
    if shape.family == "sd21":
        return _sd21_pipeline(shape)
    tokenizers = [CLIPTokenizer.from_pretrained(WEIGHTS / name) for name in ("tokenizer", "tokenizer_2")]
    return StableDiffusionXLPipeline(
        vae=bench_vae(shape),
        text_encoder=CLIPTextModel(text_config(shape, tokenizers[0], "quick_gelu")),
        text_encoder_2=CLIPTextModelWithProjection(text_config(shape, tokenizers[1], "gelu")),
        tokenizer=tokenizers[0],
        tokenizer_2=tokenizers[1],
        unet=_unet(shape),
        scheduler=_scheduler(),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )


def _sd21_pipeline(shape: BenchShape) -> Any:
    tokenizer = CLIPTokenizer.from_pretrained(WEIGHTS / "tokenizer")
    return StableDiffusionPipeline(
        vae=bench_vae(shape),
        text_encoder=CLIPTextModel(text_config(shape, tokenizer, "gelu")),
        tokenizer=tokenizer,
        unet=_unet(shape),
        scheduler=_scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def _unet(shape: BenchShape) -> Any:
    attending = shape.levels - 1
    options: dict[str, Any]
    if shape.family == "sd21":
        options = {
            "down_block_types": (*["CrossAttnDownBlock2D"] * attending, "DownBlock2D"),
            "up_block_types": ("UpBlock2D", *["CrossAttnUpBlock2D"] * attending),
            "transformer_layers_per_block": (*shape.transformer_layers, 1),
            "cross_attention_dim": shape.text_width,
        }
    else:
        options = {
            "down_block_types": ("DownBlock2D", *["CrossAttnDownBlock2D"] * attending),
            "up_block_types": (*["CrossAttnUpBlock2D"] * attending, "UpBlock2D"),
            "transformer_layers_per_block": (1, *shape.transformer_layers),
            "cross_attention_dim": 2 * shape.text_width,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": _SIZE_CHANNELS,
            "projection_class_embeddings_input_dim": shape.text_width + _SIZES * _SIZE_CHANNELS,
        }
    unet = UNet2DConditionModel(
        sample_size=shape.sample_size,
        in_channels=_LATENT_CHANNELS,
        out_channels=_LATENT_CHANNELS,
        block_out_channels=shape.block_out_channels,
        layers_per_block=shape.layers_per_block,
        # Diffusers' name for the number of heads. The level without attention has none.
        attention_head_dim=tuple(max(1, count // shape.head_channels) for count in shape.block_out_channels),
        norm_num_groups=shape.norm_groups,
        use_linear_projection=True,
        **options,
    )
    _give_output(unet.conv_out, std=1.0)
    return unet


def bench_vae(shape: BenchShape, **options: Any) -> Any:
    """Return a random VAE. The options are arguments of AutoencoderKL beside those that the shape determines."""
    levels = {4: 3, 8: 4}[shape.latent_scale]
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(shape.vae_channels, *[2 * shape.vae_channels] * (levels - 1)),
        layers_per_block=1,
        norm_num_groups=_VAE_GROUPS,
        sample_size=shape.sample_size * shape.latent_scale,
        **{"latent_channels": _LATENT_CHANNELS, "scaling_factor": 1.0, **options},
    )
    _give_output(vae.decoder.conv_out, std=_PICTURE_STD)
    return vae


def text_config(shape: BenchShape, tokenizer: CLIPTokenizer, activation: str) -> CLIPTextConfig:
    """Return the configuration of a text encoder."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.text_width,
        intermediate_size=2 * shape.text_width,
        projection_dim=shape.text_width,
        num_hidden_layers=_TEXT_LAYERS,
        num_attention_heads=_TEXT_HEADS,
        max_position_embeddings=tokenizer.model_max_length,
        hidden_act=activation,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _scheduler() -> Any:
    return EulerDiscreteScheduler.from_config(
        {
            "beta_start": 0.00085,
            "beta_end": 0.012,
            "beta_schedule": "scaled_linear",
            "timestep_spacing": "leading",
            "steps_offset": 1,
            # A random network removes no noise: taken as noise, its output leaves latents at the first sigma, |x| of
            # 50. Taken as velocity it turns them, and they keep about unit variance.
            "prediction_type": "v_prediction",
            # For a DDIM made from this one, which would clip otherwise.
            "clip_sample": False,
            "set_alpha_to_one": False,
        }
    )


def _give_output(convolution: nn.Conv2d, *, std: float) -> None:
    """Redraw a last convolution so that its output has this standard deviation, whatever its width."""
    assert convolution.bias is not None
    seen = convolution.in_channels * convolution.kernel_size[0] * convolution.kernel_size[1]
    nn.init.normal_(convolution.weight, std=std / (seen * _SILU_MOMENT) ** 0.5)
    nn.init.zeros_(convolution.bias)
