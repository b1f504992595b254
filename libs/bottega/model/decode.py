"""Decodes a latent of a model to pixels, whole or, if its memory does not suffice, in tiles."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.device.device import run_pieces
from bottega.device.memory_plan import is_out_of_memory
from bottega.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodedLatent:
    """The output of the VAE for a latent, on the model's device."""

    pixels: Tensor
    """uint8 [height, width, 3]."""
    finite: Tensor
    """bool, whether the VAE's output had no NaN or infinity, which pixels cannot represent."""
    tiled: bool
    """Whether it was decoded in tiles, which stock Diffusers does not do by default."""


def check_decodable(model: Model, latent: Tensor) -> None:
    """Raise MemoryError if a CPU has no memory to decode a latent [1, channels, height, width], even in tiles.

    A GPU's allocator raises an error itself, but on a CPU the kernel kills the process.
    """
    area = model.decoded_area(latent.shape[-2] * latent.shape[-1])
    if model.device.type == "cpu" and not model.memory.fits_decoding(area):
        raise MemoryError("less memory is available to the process than decoding takes")


def decode_image(model: Model, latent: Tensor) -> DecodedLatent:
    """Decode a latent, [1, channels, height, width], as StableDiffusionXLPipeline does."""
    return run_pieces(decode_in_pieces(model, latent))


@torch.inference_mode()
def decode_in_pieces(model: Model, latent: Tensor) -> Generator[None, None, DecodedLatent]:
    """Decode as `decode_image` does, and yield after each layer, so that other work can run between them.

    Latents are decoded one at a time: a VAE gains nothing from a batch, and the result of one latent then does not
    depend on others. Tiles are used only if the operator wants them, or if there is no memory for the whole latent.
    """
    tiled = model.is_tiled(latent.shape[-2] * latent.shape[-1])
    image = None if tiled else (yield from _decode_whole(model, latent))
    if image is None:
        image, tiled = (yield from model.decoder.decode_in_pieces(latent, tiled=True)), True
    finite = torch.isfinite(image).all()
    image = (image / 2 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).float()
    pixels = (image * 255).round().to(torch.uint8).contiguous()
    return DecodedLatent(pixels=pixels, finite=finite, tiled=tiled)


def _decode_whole(model: Model, latent: Tensor) -> Generator[None, None, Tensor | None]:
    """Decode without tiles. Return None if there was no memory for it, and tiles are smaller."""
    try:
        return (yield from model.decoder.decode_in_pieces(latent))
    except Exception as error:
        area = latent.shape[-2] * latent.shape[-1]
        if not (is_out_of_memory(error) and model.decoder.is_tiled(area, fits=False)):
            raise
    # Outside the handler, the error is gone, and with it the frames that hold what was computed.
    return None
