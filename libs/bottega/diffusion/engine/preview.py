"""Small pictures of unfinished latents, by a linear map from latent to RGB that is fitted to the model's VAE.

Decoding them with the VAE would cost as much as several steps.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn import functional

from bottega.diffusion.engine.encode import encode_image, to_latent
from bottega.diffusion.model.model import Model

_log = logging.getLogger(__name__)

# Pixels of all colour fields together: a dozen pictures of a small model, or three of SDXL, whose encoder is slow on a
# CPU. The map has five numbers for each colour, so that more pixels would not change it.
_PIXELS = 12 * 64 * 64
_MIN_PICTURES, _MAX_PICTURES = 3, 12
_MAX_SIDE = 128
# Patches of one colour on each side: coarse enough to be smooth for the VAE, fine enough to vary inside a picture.
_PATCHES = 4


class LatentPreview:
    """A linear map from one model's latents to RGB.

    Args:
        weights: [channels + 1, 3], to RGB in [0, 1]; the last row is the offset.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    @classmethod
    @torch.inference_mode()
    def fit(cls, model: Model) -> LatentPreview:
        """Fit the map by least squares to random colour fields and their latents.

        Previews are grey if the VAE encodes pictures to values that are not finite, because text-to-image works without
        an encoder.
        """
        side = min(_MAX_SIDE, model.defaults.width, model.defaults.height)
        generator = torch.Generator("cpu").manual_seed(0)
        latents: list[Tensor] = []
        colours: list[Tensor] = []
        for _ in range(min(_MAX_PICTURES, max(_MIN_PICTURES, _PIXELS // side**2))):
            patches = torch.rand(1, 3, _PATCHES, _PATCHES, generator=generator)
            field = functional.interpolate(patches, size=(side, side), mode="bilinear")
            pixels = (field[0].permute(1, 2, 0) * 255).round().to(torch.uint8)
            latent = to_latent(model, encode_image(model, pixels).mean).float().cpu()
            latents.append(_columns(latent))
            colours.append(functional.interpolate(field, size=latent.shape[2:], mode="area")[0].flatten(1).T)
        inputs, wanted = torch.cat(latents), torch.cat(colours)
        if not bool(torch.isfinite(inputs).all()):
            _log.warning("the VAE encodes pictures to values that are not numbers; previews are grey")
            grey = torch.zeros(inputs.shape[1], 3)
            grey[-1] = 0.5
            return cls(grey)
        return cls(torch.linalg.lstsq(inputs, wanted).solution)

    def draw(self, latent: Tensor) -> Tensor:
        """Return a latent [1, channels, height, width] on the CPU as a picture, uint8 [height, width, 3]."""
        height, width = latent.shape[2:]
        colours = _columns(latent.detach().float()) @ self._weights
        return (colours.clamp(0, 1) * 255).round().to(torch.uint8).reshape(height, width, 3)


def _columns(latent: Tensor) -> Tensor:
    """Return [1, channels, height, width] as [height * width, channels + 1]; the last column is 1."""
    flat = latent[0].flatten(1).T
    return torch.cat([flat, torch.ones(len(flat), 1)], dim=1)
