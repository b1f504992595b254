"""The last stage: a finished latent to pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from bottega.diffusion.model.model import Model


@torch.inference_mode()
def decode_pixels(model: Model, latent: Tensor) -> Tensor:
    """Pixels of a latent, as StableDiffusionXLPipeline makes them.

    latent: [1, channels, height, width]. Returns uint8 [height, width, 3], on the model's device.
    One latent at a time: a VAE gains nothing from a batch, and alone its result depends on nobody.
    """
    image = model.decoder.decode(latent)
    image = (image / 2 + 0.5).clamp(0, 1)[0].permute(1, 2, 0).float()
    pixels: Tensor = (image * 255).round().to(torch.uint8).contiguous()
    return pixels
