"""The step of Diffusers' EulerAncestralDiscreteScheduler, whose noise no thread waits for."""

from __future__ import annotations

import torch
from diffusers import EulerAncestralDiscreteScheduler
from torch import Tensor

from bottega.diffusion.device.pick import open_device


def ancestral_step(
    scheduler: EulerAncestralDiscreteScheduler,
    step: int,
    prediction: Tensor,
    latent: Tensor,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """The next latent, and the estimate of the finished one; equal to `scheduler.step`, which it leaves where it is.

    Diffusers draws on the CPU, where the generator is, and has the thread wait while the noise is copied to a GPU.
    prediction, latent: [1, channels, height, width]. Source: Diffusers, scheduling_euler_ancestral_discrete.py.
    """
    sigma, following = scheduler.sigmas[step], scheduler.sigmas[step + 1]
    sample = latent.to(torch.float32)
    if scheduler.config.prediction_type == "epsilon":
        estimate = sample - sigma * prediction
    elif scheduler.config.prediction_type == "v_prediction":
        estimate = prediction * (-sigma / (sigma**2 + 1) ** 0.5) + (sample / (sigma**2 + 1))
    else:
        raise ValueError(f"Euler ancestral takes no prediction of type {scheduler.config.prediction_type}")
    up = (following**2 * (sigma**2 - following**2) / sigma**2) ** 0.5
    down = (following**2 - up**2) ** 0.5
    derivative = (sample - estimate) / sigma
    drawn = torch.randn(prediction.shape, generator=generator, dtype=prediction.dtype)
    noise = open_device(prediction.device).to_device(drawn)
    stepped = sample + derivative * (down - sigma) + noise * up
    return stepped.to(prediction.dtype), estimate
