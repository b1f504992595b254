"""The VAE's decoder: in which element type it runs, in one piece or in tiles, and the maths around it.

In float16 SDXL's decoder overflows: what its residual blocks add up passes 65504. Each of its layers reads that sum
through a GroupNorm, or carries it on linearly; so the sum may be kept at a fraction of its size, with the epsilon of
the norms at the fraction's square, and the picture is the same one. A power of two as the fraction rounds nothing.

A decoder in half precision is tried on a latent before it is used, beside float32: what differs by more than 40 dB of
PSNR allow is not taken.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

_log = logging.getLogger(__name__)

# Sums in float16 reach 65504 / _FRACTION so, some two millions; those of SDXL stay below. What is small loses no bit
# until it is under 6e-5 / _FRACTION = .002, far below what a GroupNorm's statistics notice.
_FRACTION = 2.0**-5
LEAST_PSNR_DB = 40.0
# A quarter of the model's own size: what a decoder's element type changes shows in any latent.
_TRIAL_SHARE = 0.25
_LEAST_TRIAL = 8
# Of pictures with more pixels than so many times the model's own, where no number is configured.
_UNTILED_SIZES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeSettings:
    """What an operator says. dtype: auto, float32, float16 or bfloat16.

    tile_pixels: of larger pictures tiles are decoded and blended; 0 is four times the model's own size.
    """

    dtype: str = "auto"
    tile_pixels: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VaeDecoder:
    """dtype: of latents that go in. most_area: elements of a latent that are decoded in one piece.

    statistics: mean and standard deviation of latents, [1, channels, 1, 1]; None where the VAE has none.
    """

    vae: AutoencoderKL
    dtype: torch.dtype
    most_area: int
    statistics: tuple[Tensor, Tensor] | None = None

    @property
    def tile_area(self) -> int:
        """Elements of a tile."""
        return int(self.vae.tile_latent_min_size) ** 2

    def area_at_once(self, area: int) -> int:
        """Of a latent of so many elements, how many are decoded at once."""
        return area if area <= self.most_area else min(area, self.tile_area)

    def decode(self, latent: Tensor) -> Tensor:
        """latent: [1, channels, height, width] of the backbone. Returns [1, 3, height, width], about in [-1, 1]."""
        vae = self.vae
        latent = _to_vae_scale(latent.to(self.dtype), vae.config.scaling_factor, self.statistics)
        if latent.shape[-2] * latent.shape[-1] <= self.most_area:
            image: Tensor = vae.decode(latent, return_dict=False)[0]
            return image
        tiled: Tensor = vae.tiled_decode(latent, return_dict=False)[0]
        return tiled


def encode_dtype(vae: AutoencoderKL) -> torch.dtype:
    """That pictures are encoded in."""
    dtype: torch.dtype = vae.encoder.conv_in.weight.dtype
    return dtype


def make_decoder(vae: AutoencoderKL, *, device: torch.device, dtype: torch.dtype, settings: VaeSettings) -> VaeDecoder:
    """The decoder of a VAE that is on its device; the rest of it is put into the element type that it encodes in.

    dtype: of the model. Raises ValueError where one was configured in which the VAE draws something else.
    """
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    own_area = (int(vae.config.sample_size) // scale) ** 2
    decoding = _pick_dtype(vae, device=device, dtype=dtype, wanted=settings.dtype)
    for part in (vae.encoder, vae.quant_conv):
        if part is not None and vae.config.force_upcast:
            part.to(torch.float32)  # Diffusers encodes so wherever that is set
    most_area = settings.tile_pixels // scale**2 if settings.tile_pixels else _UNTILED_SIZES * own_area
    return VaeDecoder(vae=vae, dtype=decoding, most_area=most_area, statistics=_statistics(vae, device))


def psnr_db(image: Tensor, reference: Tensor) -> float:
    """Of pictures in [0, 1]; NaN where one of them has some."""
    error = float((image.double() - reference.double()).square().mean())
    return math.inf if error == 0.0 else -10.0 * math.log10(error) if math.isfinite(error) else math.nan


def _pick_dtype(vae: AutoencoderKL, *, device: torch.device, dtype: torch.dtype, wanted: str) -> torch.dtype:
    """Puts the decoder into an element type: the configured one, or by itself the first that draws the same."""
    if wanted != "auto":
        picked = _first_equal(vae, device, [getattr(torch, wanted)])
        if picked is None:
            raise ValueError(f"vae_dtype {wanted}: this VAE draws something else in it than in float32; use auto")
        return picked
    if device.type == "cpu":
        # As Diffusers does: float16 is slow on a CPU anyhow.
        like_stock = torch.float32 if dtype == torch.float16 and vae.config.force_upcast else dtype
        _to(vae, like_stock)
        return like_stock
    halves = {torch.float16: [torch.float16], torch.bfloat16: [torch.bfloat16, torch.float16]}
    return _first_equal(vae, device, halves.get(dtype, [])) or _first_equal(vae, device, [torch.float32]) or dtype


@torch.inference_mode()
def _first_equal(vae: AutoencoderKL, device: torch.device, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """Puts the decoder into the first of these in which it draws what it does in float32; None where there is none."""
    loaded = copy.deepcopy((vae.decoder, vae.post_quant_conv))
    _to(vae, torch.float32)
    if torch.float32 in dtypes:
        return torch.float32
    latent = _trial_latent(vae, device)
    reference = _drawn(vae, latent)
    for dtype in dtypes:
        vae.decoder, vae.post_quant_conv = copy.deepcopy(loaded)
        _to(vae, dtype)
        if dtype == torch.float16 and not _shrink_sums(vae):
            _log.info("this VAE's decoder has parts that are not known; it is tried in float16 as it is")
        found_db = psnr_db(_drawn(vae, latent), reference)
        facts = {"dtype": str(dtype).removeprefix("torch."), "psnr_db": round(found_db, 1)}
        if found_db >= LEAST_PSNR_DB:
            _log.info("the VAE decodes in half precision", extra=facts)
            return dtype
        _log.warning("the VAE draws something else in this element type than in float32", extra=facts)
    vae.decoder, vae.post_quant_conv = loaded
    return None


def _to(vae: AutoencoderKL, dtype: torch.dtype) -> None:
    for part in (vae.decoder, vae.post_quant_conv):
        if part is not None:
            part.to(dtype)


def _trial_latent(vae: AutoencoderKL, device: torch.device) -> Tensor:
    """A latent of noise, of the size that latents have at a sampler's end, as the VAE takes it."""
    side = max(_LEAST_TRIAL, int(vae.tile_latent_min_size * _TRIAL_SHARE))
    noise = torch.randn(1, int(vae.config.latent_channels), side, side, generator=torch.Generator().manual_seed(0))
    return _to_vae_scale(noise.to(device), vae.config.scaling_factor, _statistics(vae, device))


def _drawn(vae: AutoencoderKL, latent: Tensor) -> Tensor:
    image: Tensor = vae.decode(latent.to(vae.decoder.conv_in.weight.dtype), return_dict=False)[0]
    return (image.float() / 2 + 0.5).clamp(0, 1)


def _statistics(vae: AutoencoderKL, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Mean and standard deviation of latents, where the VAE has some."""
    mean, std = vae.config.latents_mean, vae.config.latents_std
    if mean is None or std is None:
        return None
    return torch.tensor(mean, device=device).view(1, -1, 1, 1), torch.tensor(std, device=device).view(1, -1, 1, 1)


def _to_vae_scale(latent: Tensor, factor: float, statistics: tuple[Tensor, Tensor] | None) -> Tensor:
    if statistics is None:
        return latent / factor
    mean, std = (each.to(latent.dtype) for each in statistics)
    return latent * std / factor + mean


def _shrink_sums(vae: AutoencoderKL) -> bool:
    """Keeps what the decoder's blocks add up at _FRACTION of its size. False, and nothing done, where a part is not
    one that is known to carry it on.
    """
    decoder: Any = vae.decoder
    resnets = [module for module in decoder.modules() if type(module) is ResnetBlock2D]
    attentions = [module for module in decoder.modules() if type(module) is Attention]
    upsamplers = [module for module in decoder.modules() if type(module) is Upsample2D]
    if not all(_known_resnet(each) for each in resnets) or not all(_known_attention(each) for each in attentions):
        return False
    if not all(each.norm is None and isinstance(each.conv, nn.Conv2d) for each in upsamplers):
        return False
    known = {id(each) for part in _layers(resnets, attentions, upsamplers) for each in part}
    known |= {id(decoder.conv_in), id(decoder.conv_norm_out), id(decoder.conv_out)}
    with_weights = [each for each in decoder.modules() if isinstance(each, nn.Conv2d | nn.Linear | nn.GroupNorm)]
    if any(id(each) not in known for each in with_weights):
        return False
    for resnet in resnets:
        for norm in (resnet.norm1, resnet.norm2):
            norm.eps *= _FRACTION**2
        for conv in (resnet.conv1, resnet.conv2):
            _scale(conv.weight, conv.bias)
        if resnet.conv_shortcut is not None:
            _scale(resnet.conv_shortcut.bias)
    for attention in attentions:
        attention.group_norm.eps *= _FRACTION**2
        _scale(attention.to_out[0].weight, attention.to_out[0].bias)
    for upsampler in upsamplers:
        _scale(upsampler.conv.bias)
    _scale(decoder.conv_in.weight, decoder.conv_in.bias)
    decoder.conv_norm_out.eps *= _FRACTION**2
    return True


def _layers(resnets: Sequence[Any], attentions: Sequence[Any], upsamplers: Sequence[Any]) -> Iterator[list[Any]]:
    """The layers with weights of each."""
    for resnet in resnets:
        yield [resnet.norm1, resnet.norm2, resnet.conv1, resnet.conv2, resnet.conv_shortcut]
    for attention in attentions:
        yield [attention.group_norm, attention.to_q, attention.to_k, attention.to_v, attention.to_out[0]]
    for upsampler in upsamplers:
        yield [upsampler.conv]


def _known_resnet(resnet: Any) -> bool:
    norms = isinstance(resnet.norm1, nn.GroupNorm) and isinstance(resnet.norm2, nn.GroupNorm)
    sized = resnet.upsample is not None or resnet.downsample is not None
    return norms and resnet.time_emb_proj is None and resnet.output_scale_factor == 1 and not sized


def _known_attention(attention: Any) -> bool:
    plain = isinstance(attention.group_norm, nn.GroupNorm) and attention.spatial_norm is None
    return plain and attention.residual_connection and attention.rescale_output_factor == 1


def _scale(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None:
            tensor.data.mul_(_FRACTION)
