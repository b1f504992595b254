"""Guidance and the sampler's step: computes a request's next latent from the predictions for its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import rescale_noise_cfg
from torch import Tensor

from bottega.model.operations import Operations
from bottega.model.rows import Half
from bottega.model.samplers import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """Classifier-free guidance of a request, as in Diffusers' pipelines."""

    scale: float
    rescale: float = 0.0


def guided_step(
    sampler: Sampler,
    evaluation: int,
    latent: Tensor,
    noise: Mapping[Half, Tensor],
    *,
    guidance: Guidance,
    generator: torch.Generator | None,
    operations: Operations,
) -> tuple[Tensor, Tensor]:
    """Apply guidance and the sampler to an evaluation. Return the next latent, and an estimate of the finished one.

    Args:
        latent: [1, channels, height, width].
        noise: The prediction for each half of guidance, [channels, height, width].
        generator: Random generator on the CPU, for samplers that draw noise.
    """
    conditional = noise[Half.CONDITIONAL][None]
    unconditional = noise[Half.UNCONDITIONAL][None] if Half.UNCONDITIONAL in noise else None
    if operations.guided_euler is not None and guidance.rescale == 0.0:
        euler = sampler.euler_step(evaluation)
        if euler is not None:
            made = operations.guided_euler(conditional, unconditional, latent, scale=guidance.scale, step=euler)
            sampler.count_step()
            return made
    combined = conditional
    if unconditional is not None:
        combined = unconditional + guidance.scale * (conditional - unconditional)
        if guidance.rescale > 0.0:
            combined = rescale_noise_cfg(combined, conditional, guidance_rescale=guidance.rescale)
    following, estimate = sampler.step(combined, evaluation, latent, generator)
    return following.to(latent.dtype), estimate
