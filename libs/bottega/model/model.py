"""A model on a device: the parts of a folder in Diffusers' layout, its sizes and its digest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import (
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2Tokenizer,
    Qwen3Model,
    T5EncoderModel,
    T5Tokenizer,
)

from bottega.device.device import Device
from bottega.device.memory_plan import MemoryPlan
from bottega.model.backbones import MadeBackbone
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.family import ModelFamily
from bottega.model.operations import Operations
from bottega.model.sampler_choices import ModelSamplers
from bottega.model.schedulers import SamplerKind
from bottega.model.text_encoders import TextCache
from bottega.model.vae import VaeDecoder
from bottega.model.weights import NOWHERE, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values for parameters that a request does not set."""

    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    edit_guidance_scale: float
    """Default guidance scale of edits without ControlNets."""
    strength: float
    """Default strength of image-to-image without ControlNets."""
    edit_strength: float
    sampler: SamplerKind
    use_karras_sigmas: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """The parts of one model, in evaluation mode. They must be run in inference mode."""

    name: str
    family: ModelFamily
    digest: str
    """SHA-256 of weights and configuration, hex."""
    dtype: torch.dtype
    device: torch.device
    """With its index if it is a GPU."""
    runtime: Device
    """Streams, events and copies of the device."""
    tokenizers: tuple[CLIPTokenizer | T5Tokenizer | Qwen2Tokenizer, ...]
    """In the order of the text encoders."""
    text_encoders: tuple[CLIPTextModel | CLIPTextModelWithProjection | T5EncoderModel | Qwen3Model, ...]
    """In the family's order."""
    backbone: MadeBackbone
    vae: AutoencoderKL
    decoder: VaeDecoder
    """Decodes with the VAE."""
    samplers: ModelSamplers
    zeros_for_absent_negative: bool
    latent_scale: int
    """Number of pixels, on each side, that one latent element stands for."""
    defaults: Defaults
    operations: Operations = field(default_factory=Operations)
    """Operations that accelerations may replace."""
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    """Plan of the memory of the device."""
    prompt_cache: TextCache = field(default_factory=TextCache)
    """Cache of encoded prompts."""

    @property
    def encodes(self) -> bool:
        """Whether the text encoders are loaded. If not, they have no weights, and another process computes them."""
        return bool(self.text_encoders[0].device.type != NOWHERE)

    @property
    def is_as_stock(self) -> bool:
        """Whether the weights are those of `from_pretrained` with the model's element type: of encoders and network."""
        return all(encoder.dtype == self.dtype for encoder in self.text_encoders) and not self.operations.rounds_weights

    @property
    def decodes(self) -> bool:
        """Whether the VAE's decoder is loaded. If not, it has no weights, and another process decodes."""
        return bool(self.vae.decoder.conv_in.weight.device.type != NOWHERE)

    @property
    def scheduler_config(self) -> Mapping[str, Any]:
        """The model's scheduler configuration, from which samplers are created."""
        return self.samplers.config

    @property
    def latent_dtype(self) -> torch.dtype:
        """Element type of latents between steps."""
        return torch.float32 if self.family.float32_latents else self.dtype

    @property
    def latent_channels(self) -> int:
        """Number of channels of the latent."""
        return int(self.vae.config.latent_channels)

    @property
    def unet(self) -> UNet2DConditionModel | None:
        """The denoising network if it is a UNet; None if it is a transformer."""
        return self.backbone.network if isinstance(self.backbone, UNetBackbone) else None

    @property
    def image_channels(self) -> int:
        """Number of channels of a mask and a masked image that the network reads after the latent; 0 if it has none."""
        return self.backbone.image_channels

    @property
    def mask_channels(self) -> int:
        """Number of channels of the mask: 1, or one for each pixel of an element of the latent."""
        return max(1, self.image_channels - self.latent_channels)

    @property
    def guidance_width(self) -> int:
        """Width of the embedding of the guidance scale that the UNet reads instead of a second row; 0 without one."""
        return int(self.backbone.network.config.get("time_cond_proj_dim") or 0)

    @property
    def embeds_guidance(self) -> bool:
        """Whether guidance takes no second row: the network reads its scale, or was trained to draw without it."""
        return self.guidance_width > 0 or self.family.distilled_guidance

    @property
    def patch_size(self) -> int:
        """Number of elements of the latent, on each side, that one token of a transformer stands for; 1 for UNets."""
        return self.backbone.patch_size

    @property
    def max_side(self) -> int | None:
        """Largest width or height in pixels for which the network has embeddings of positions; None for any."""
        config = self.backbone.network.config
        # Number of positions of rows and columns. `axes_lens` has it by axis, after the axis for the prompt's tokens.
        places = config.get("pos_embed_max_size") or min(config.get("axes_lens", [0])[1:], default=0)
        return int(places) * self.patch_size * self.latent_scale if places else None

    def tokens(self, width: int, height: int) -> int:
        """Return the number of tokens of a picture, of patches of its latent. Sides are in pixels."""
        side = self.latent_scale * self.patch_size
        return (width // side) * (height // side)

    @property
    def max_clip_skip(self) -> int:
        """The largest `clip_skip`: it takes the token embeddings of the text encoder with the fewest layers.

        It is 0 if the model reads no states between layers.
        """
        if not self.family.states_from_end:
            return 0
        layers = min(
            encoder.config.num_hidden_layers
            for encoder in self.text_encoders
            if not isinstance(encoder, T5EncoderModel)  # which never leaves out layers
        )
        return int(layers) + 1 - self.family.states_from_end

    @property
    def denoiser(self) -> tuple[str, nn.Module]:
        """The part of the denoising network, such as `unet`, and the network."""
        return next(iter(self.family.networks)), self.backbone.network

    @property
    def networks(self) -> Mapping[str, nn.Module]:
        """The networks that LoRAs may change, by the name of their part."""
        encoders = dict(zip(self.family.text_encoders, self.text_encoders, strict=True))
        return {**encoders, **dict([self.denoiser])}

    @property
    def size_multiple(self) -> int:
        """Number of pixels that width and height must be multiples of. Diffusers accepts multiples of 8."""
        return math.lcm(8, self.latent_scale * self.patch_size)

    def is_tiled(self, area: int) -> bool:
        """Return whether a latent of `area` elements is decoded in tiles, by the measurements so far."""
        if area <= self.decoder.tile_area:
            return False  # Reading the available memory of a CPU takes time.
        return self.decoder.is_tiled(area, fits=self.memory.fits_decoding(area))

    def decoded_area(self, area: int) -> int:
        """Return how many elements of a latent of this area are decoded at once."""
        return self.decoder.tile_area if self.is_tiled(area) else area

    @property
    def edits_refused_because(self) -> str:
        """Why edits with a mask are refused; empty if they are not."""
        if self.decoder.statistics is None:
            return ""
        # Diffusers' inpainting pipeline applies them when it decodes but not when it encodes, which shifts colours.
        return f"model {self.name} cannot edit pictures, because its VAE has latents_mean and latents_std; use another"

    @property
    def dtype_name(self) -> str:
        """float32, float16 or bfloat16."""
        return dtype_name(self.dtype)
