"""Diffusers' inpainting pipelines with composed noise: what masked blocks are compared with.

Outside its mask an edit with masked blocks has the image latent and the noise of the recording that it reads; inside,
its request's own noise. Here the pipelines compute such an edit in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import PIL.Image
import torch
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """What edits draw from their generators: image_latent and noise, [rows, channels, height, width]."""

    image_latent: Tensor
    noise: Tensor

    @classmethod
    def stack(cls, each: Sequence[Draws]) -> Draws:
        """Those of the rows of a batch."""
        return cls(
            image_latent=torch.cat([draws.image_latent for draws in each]),
            noise=torch.cat([draws.noise for draws in each]),
        )


def draws_of(pipeline: Any, image: PIL.Image.Image, *, seed: int, width: int, height: int) -> Draws:
    """What an edit of this image with this seed draws, in its order: of the image's distribution, then noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = pipeline.image_processor.preprocess(image, height=height, width=width).to(pipeline.vae.dtype)
    with torch.inference_mode():
        latent = pipeline._encode_vae_image(image=pixels, generator=generator)
        noise = randn_tensor(latent.shape, generator=generator, device=latent.device, dtype=latent.dtype)
    return Draws(image_latent=latent, noise=noise)


@contextmanager
def composed_noise(pipeline: Any, recorded: Draws, masks: Sequence[PIL.Image.Image]) -> Iterator[None]:
    """In the block, the pipeline's edits have `recorded` outside their masks, a row of it for each row of the batch.

    masks: grey, of the size that is drawn; the pipeline's own mask_image.
    """
    prepare = pipeline.prepare_latents
    inside = _latent_masks(masks, recorded.noise.shape[-2:])

    def prepared(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        _, noise, _ = prepare(*args, **kwargs)
        noise = torch.where(inside, noise, recorded.noise)
        scheduler = pipeline.scheduler
        if kwargs["is_strength_max"]:
            return noise * getattr(scheduler, "init_noise_sigma", 1.0), noise, recorded.image_latent
        if hasattr(scheduler, "scale_noise"):  # of flow matching
            begun = scheduler.scale_noise(recorded.image_latent, kwargs["timestep"], noise)
        else:
            begun = scheduler.add_noise(recorded.image_latent, noise, kwargs["timestep"])
        return begun, noise, recorded.image_latent

    with patch.object(pipeline, "prepare_latents", prepared):
        yield


def _latent_masks(masks: Sequence[PIL.Image.Image], size: torch.Size) -> Tensor:
    """Bool [rows, 1, height, width], as the pipelines resize a mask that they have made black and white."""
    white = np.stack([np.asarray(mask.convert("L")) >= 128 for mask in masks])
    return functional.interpolate(torch.from_numpy(white)[:, None].float(), size=tuple(size)) > 0.5
