"""The step of Diffusers' EulerAncestralDiscreteScheduler, without a thread that waits for noise."""

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
    """Return the next latent and the estimate of the finished one, equal to those of `scheduler.step`.

    Diffusers draws noise on the CPU, where the generator is, and its thread waits while the noise is copied to a GPU.
    The scheduler's own step is not advanced. Source: Diffusers, scheduling_euler_ancestral_discrete.py.

    Args:
        scheduler: The scheduler.
        step: The step to make.
        prediction: The model's prediction, [1, channels, height, width].
        latent: The latent before the step, in the same shape.
        generator: On the CPU.
    """
    sigma, following = scheduler.sigmas[step], scheduler.sigmas[step + 1]
    sample = latent.to(torch.float32)
    if scheduler.config.prediction_type == "epsilon":
        estimate = sample - sigma * prediction
    elif scheduler.config.prediction_type == "v_prediction":
        estimate = prediction * (-sigma / (sigma**2 + 1) ** 0.5) + (sample / (sigma**2 + 1))
    else:
        raise ValueError(f"Euler ancestral does not support the prediction type {scheduler.config.prediction_type}")
    up = (following**2 * (sigma**2 - following**2) / sigma**2) ** 0.5
    down = (following**2 - up**2) ** 0.5
    derivative = (sample - estimate) / sigma
    drawn = torch.randn(prediction.shape, generator=generator, dtype=prediction.dtype)
    noise = open_device(prediction.device).to_device(drawn)
    stepped = sample + derivative * (down - sigma) + noise * up
    return stepped.to(prediction.dtype), estimate
