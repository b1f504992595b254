"""The decoding of latents by a model's VAE: the element type, decoding in one piece or in tiles, and pixels.

By default it decodes as stock Diffusers does: in the model's element type, or in float32 if that is float16 and the
VAE's configuration has `force_upcast`. An operator may choose another type. A half-precision type is tried on a latent
and compared with float32 before it is used, and refused if the PSNR is below 40 dB.

In float16 SDXL's decoder overflows, because the sums of its residual blocks exceed 65504. All of its layers either read
such a sum through a GroupNorm or pass it on linearly. So the sums can be stored at a fraction of their size, with the
epsilon of the norms multiplied by the square of the fraction, without changing the picture. The fraction is a power of
two, so that nothing is rounded.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKL
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import Decoder, DiagonalGaussianDistribution, Encoder
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.unets.unet_2d_blocks import DownEncoderBlock2D, UNetMidBlock2D, UpDecoderBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

from bottega.device.device import run_pieces
from bottega.model.weights import dtype_name

_log = logging.getLogger(__name__)

# Sums in float16 can then reach 65504 / _FRACTION, about two million; those of SDXL stay below. Small values lose bits
# only under 6e-5 / _FRACTION = .002, which does not affect a GroupNorm's statistics.
_FRACTION = 2.0**-5
LEAST_PSNR_DB = 40.0
# Share of the side of the model's own latents. Any latent shows the effect of a decoder's element type.
_TRIAL_SHARE = 0.25
_LEAST_TRIAL = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VaeSettings:
    """An operator's settings of a VAE."""

    dtype: str = "auto"
    """Element type in which it decodes: float32, float16 or bfloat16; auto is that of stock Diffusers."""
    tile_pixels: int = 0
    """Pictures with more pixels are decoded in tiles, which are blended; 0 for never."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VaeDecoder:
    """A VAE on its device, ready to decode."""

    vae: AutoencoderKL
    dtype: torch.dtype
    """Element type in which it decodes."""
    stock_dtype: torch.dtype
    """Element type in which stock Diffusers would decode."""
    max_area: int | None = None
    """Elements of a latent above which the operator wants tiles; None for never."""
    statistics: tuple[Tensor, Tensor] | None = None
    """Mean and standard deviation of latents, [1, channels, 1, 1]; None if the VAE has none."""

    @property
    def dtype_name(self) -> str:
        """float32, float16 or bfloat16."""
        return dtype_name(self.dtype)

    @property
    def tile_area(self) -> int:
        """Number of elements of a tile."""
        return int(self.vae.tile_latent_min_size) ** 2

    def as_decoded(self, *, tiled: bool) -> DecodedAs:
        """Return how it decodes a latent."""
        return DecodedAs(dtype=self.dtype_name, stock_dtype=self.dtype == self.stock_dtype, tiled=tiled)

    def is_tiled(self, area: int, *, fits: bool = True) -> bool:
        """Return whether a latent of `area` elements is decoded in tiles.

        Args:
            area: Height times width of the latent.
            fits: Whether the device has memory for all of it at once.
        """
        wanted = not fits or (self.max_area is not None and area > self.max_area)
        return wanted and area > self.tile_area

    def decode(self, latent: Tensor, *, tiled: bool = False) -> Tensor:
        """Decode a latent [1, channels, height, width] of the backbone to [1, 3, height, width], about in [-1, 1]."""
        return run_pieces(self.decode_in_pieces(latent, tiled=tiled))

    def decode_in_pieces(self, latent: Tensor, *, tiled: bool = False) -> Generator[None, None, Tensor]:
        """Decode as `decode` does, and yield after each layer of the decoder, so that other work can run between them.

        The layers run in the order of `AutoencoderKL.decode` and `tiled_decode`, so that the result is the same bit for
        bit.
        """
        latent = _to_vae_scale(latent.to(self.dtype), self.vae.config, self.statistics)
        return (yield from _decode_tiles(self.vae, latent) if tiled else _decode_layers(self.vae, latent))


def encode_in_pieces(vae: AutoencoderKL, image: Tensor) -> Generator[None, None, DiagonalGaussianDistribution]:
    """Return the latent distribution of [1, 3, height, width] in [-1, 1], and yield after each layer of the encoder.

    The result is that of `AutoencoderKL.encode` bit for bit. Source: AutoencoderKL._encode of Diffusers.
    """
    hidden = image.to(encode_dtype(vae))
    for layer in _layers_in_order(vae.encoder):
        hidden = layer(hidden)
        yield
    return DiagonalGaussianDistribution(hidden if vae.quant_conv is None else vae.quant_conv(hidden))


def encode_dtype(vae: AutoencoderKL) -> torch.dtype:
    """Return the element type that a VAE encodes pictures in."""
    dtype: torch.dtype = vae.encoder.conv_in.weight.dtype
    return dtype


def make_decoder(vae: AutoencoderKL, *, device: torch.device, dtype: torch.dtype, settings: VaeSettings) -> VaeDecoder:
    """Convert the parts of a VAE to the element types that they run in, and return its decoder.

    Args:
        vae: On its device, in the model's element type.
        device: Its device.
        dtype: The model's element type.
        settings: The operator's settings. A VAE that decodes in float32 because of them also encodes in float32.

    Raises:
        ValueError: The VAE draws something else in the chosen element type than in float32.
    """
    stock = torch.float32 if dtype == torch.float16 and vae.config.force_upcast else dtype
    wanted = stock if settings.dtype == "auto" else getattr(torch, settings.dtype)
    if wanted in {stock, torch.float32}:
        _to(vae, wanted)
    elif not _try_half_precision(vae, device, wanted):
        raise ValueError(
            f"vae.dtype {settings.dtype}: with it this VAE draws something else than in float32; use auto or float32"
        )
    # Stock Diffusers encodes in float32 wherever force_upcast is set, whatever the model's element type.
    if vae.config.force_upcast or settings.dtype == "float32":
        for part in (vae.encoder, vae.quant_conv):
            if part is not None:
                part.to(torch.float32)
    scale = 2 ** (len(vae.config.block_out_channels) - 1)
    max_area = settings.tile_pixels // scale**2 if settings.tile_pixels else None
    return VaeDecoder(vae=vae, dtype=wanted, stock_dtype=stock, max_area=max_area, statistics=_statistics(vae, device))


def psnr_db(image: Tensor, reference: Tensor) -> float:
    """Return the PSNR of two pictures in [0, 1]; NaN if one of them contains NaN."""
    error = float((image.double() - reference.double()).square().mean())
    return math.inf if error == 0.0 else -10.0 * math.log10(error) if math.isfinite(error) else math.nan


@torch.inference_mode()
def _try_half_precision(vae: AutoencoderKL, device: torch.device, dtype: torch.dtype) -> bool:
    """Convert the decoder to a half-precision type. Return whether it draws the same as in float32."""
    loaded = copy.deepcopy((vae.decoder, vae.post_quant_conv))
    _to(vae, torch.float32)
    latent = _trial_latent(vae, device)
    reference = _drawn(vae, latent)
    vae.decoder, vae.post_quant_conv = loaded
    _to(vae, dtype)
    if dtype == torch.float16 and not _shrink_sums(vae):
        _log.info("this VAE's decoder has unknown parts; it is tried in float16 without changes")
    found_db = psnr_db(_drawn(vae, latent), reference)
    facts = {"dtype": dtype_name(dtype), "psnr_db": round(found_db, 1)}
    if found_db >= LEAST_PSNR_DB:
        _log.info("the VAE decodes in half precision", extra=facts)
        return True
    _log.warning("the VAE draws something else in this element type than in float32", extra=facts)
    return False


def _to(vae: AutoencoderKL, dtype: torch.dtype) -> None:
    for part in (vae.decoder, vae.post_quant_conv):
        if part is not None:
            part.to(dtype)


def _trial_latent(vae: AutoencoderKL, device: torch.device) -> Tensor:
    """Return a latent of noise, of the magnitude that latents have after the last step, in the VAE's scale."""
    side = max(_LEAST_TRIAL, int(vae.tile_latent_min_size * _TRIAL_SHARE))
    noise = torch.randn(1, int(vae.config.latent_channels), side, side, generator=torch.Generator().manual_seed(0))
    return _to_vae_scale(noise.to(device), vae.config, _statistics(vae, device))


def _drawn(vae: AutoencoderKL, latent: Tensor) -> Tensor:
    image: Tensor = vae.decode(latent.to(vae.decoder.conv_in.weight.dtype), return_dict=False)[0]
    return (image.float() / 2 + 0.5).clamp(0, 1)


def _decode_layers(vae: AutoencoderKL, latent: Tensor) -> Generator[None, None, Tensor]:
    """Decode a latent in the VAE's scale, and yield after each layer. Source: AutoencoderKL._decode of Diffusers."""
    hidden = latent if vae.post_quant_conv is None else vae.post_quant_conv(latent)
    for layer in _layers_in_order(vae.decoder):
        hidden = layer(hidden)
        yield
    return hidden


def _layers_in_order(network: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield the layers of an encoder or decoder in their order. A network or a block of an unknown kind is one layer.

    Source: the forward methods of Diffusers' Encoder, Decoder and their blocks.
    """
    if type(network) is Decoder:
        blocks = (network.mid_block, *network.up_blocks)
    elif type(network) is Encoder:
        blocks = (*network.down_blocks, network.mid_block)
    else:
        yield network
        return
    yield network.conv_in
    for block in blocks:
        yield from _block_layers(block)
    yield lambda hidden: network.conv_out(network.conv_act(network.conv_norm_out(hidden)))


def _block_layers(block: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    resnets = [partial(resnet, temb=None) for resnet in getattr(block, "resnets", ())]
    if type(block) is UNetMidBlock2D:
        yield resnets[0]
        for attention, resnet in zip(block.attentions, resnets[1:], strict=True):
            yield from () if attention is None else (attention,)
            yield resnet
    elif type(block) is DownEncoderBlock2D:
        yield from (*resnets, *(block.downsamplers or ()))
    elif type(block) is UpDecoderBlock2D:
        yield from (*resnets, *(block.upsamplers or ()))
    else:
        yield block


def _decode_tiles(vae: AutoencoderKL, latent: Tensor) -> Generator[None, None, Tensor]:
    """Decode a latent in the VAE's scale in tiles, and yield after each layer of a tile.

    Source: AutoencoderKL.tiled_decode of Diffusers.
    """
    side = int(vae.tile_latent_min_size)
    step = int(side * (1 - vae.tile_overlap_factor))
    overlap = int(vae.tile_sample_min_size * vae.tile_overlap_factor)
    kept = vae.tile_sample_min_size - overlap
    rows: list[list[Tensor]] = []
    for top in range(0, latent.shape[2], step):
        rows.append([])
        for left in range(0, latent.shape[3], step):
            tile = latent[:, :, top : top + side, left : left + side]
            rows[-1].append((yield from _decode_layers(vae, tile)))
    blended: list[Tensor] = []
    for above, row in zip([[], *rows], rows, strict=False):
        tiles: list[Tensor] = []
        for place, decoded in enumerate(row):
            tile = vae.blend_v(above[place], decoded, overlap) if above else decoded
            tile = vae.blend_h(row[place - 1], tile, overlap) if place else tile
            tiles.append(tile[:, :, :kept, :kept])
        blended.append(torch.cat(tiles, dim=3))
    return torch.cat(blended, dim=2)


def _statistics(vae: AutoencoderKL, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Return the mean and standard deviation of latents, or None if the VAE has none."""
    mean, std = vae.config.latents_mean, vae.config.latents_std
    if mean is None or std is None:
        return None
    return torch.tensor(mean, device=device).view(1, -1, 1, 1), torch.tensor(std, device=device).view(1, -1, 1, 1)


def _to_vae_scale(latent: Tensor, config: Any, statistics: tuple[Tensor, Tensor] | None) -> Tensor:
    if statistics is None:
        scaled: Tensor = latent / config.scaling_factor
        return scaled + float(config.shift_factor) if config.shift_factor else scaled
    mean, std = (tensor.to(latent.dtype) for tensor in statistics)
    return latent * std / float(config.scaling_factor) + mean


def _shrink_sums(vae: AutoencoderKL) -> bool:
    """Store the sums of the decoder's blocks at _FRACTION of their size.

    Return False, and change nothing, if the decoder has an unknown part.
    """
    decoder: Any = vae.decoder
    resnets = [module for module in decoder.modules() if type(module) is ResnetBlock2D]
    attentions = [module for module in decoder.modules() if type(module) is Attention]
    upsamplers = [module for module in decoder.modules() if type(module) is Upsample2D]
    if not (all(map(_known_resnet, resnets)) and all(map(_known_attention, attentions))):
        return False
    if not all(module.norm is None and isinstance(module.conv, nn.Conv2d) for module in upsamplers):
        return False
    known = {id(module) for part in _layers(resnets, attentions, upsamplers) for module in part}
    known |= {id(decoder.conv_in), id(decoder.conv_norm_out), id(decoder.conv_out)}
    with_weights = [module for module in decoder.modules() if isinstance(module, nn.Conv2d | nn.Linear | nn.GroupNorm)]
    if any(id(module) not in known for module in with_weights):
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
    """Yield the layers with weights of each module."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedAs:
    """How a latent was decoded."""

    dtype: str
    """float32, float16 or bfloat16."""
    stock_dtype: bool
    """Whether stock Diffusers decodes in this element type too."""
    tiled: bool
    """Whether it was decoded in tiles, which stock Diffusers does not do by default."""
