"""Stock schedulers driven as Diffusers' pipelines drive them, with a prediction that needs no network."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
)
from diffusers.schedulers.scheduling_lms_discrete import LMSDiscreteScheduler
from torch import Tensor

from bottega.model.sampler_choices import ModelSamplers, SamplerChoice
from bottega.model.schedulers import SamplerKind
from bottega.planning import steps_to_run

PLAIN = tuple(kind for kind in SamplerKind if not kind.value.startswith(("edm_", "flow_")))
"""Samplers with which models draw that predict noise, and were not trained with EDM's noise levels."""
BASIC = (SamplerKind.EULER, SamplerKind.EULER_ANCESTRAL, SamplerKind.DDIM, SamplerKind.DPMPP_2M)
"""A sampler of each kind that the engine treats in its own way; tables of the model's tests have all samplers."""
TWICE = (SamplerKind.HEUN, SamplerKind.KDPM2, SamplerKind.KDPM2_ANCESTRAL)
"""Samplers that evaluate the network twice in a step."""
SEVERAL = (SamplerKind.PNDM, *TWICE)
"""Samplers that evaluate the network more often than they make steps."""
WITH_STATE = (
    *BASIC,
    SamplerKind.DPMPP_2S,
    SamplerKind.UNIPC,
    SamplerKind.LMS,
    SamplerKind.DDPM,
    SamplerKind.LCM,
    *SEVERAL,
)
"""These, and samplers with other states between steps or other draws."""
# These make a schedule of all timesteps of training when they are made, for .2 s, which the next one replaces.
_TRAINED_FIRST = (
    HeunDiscreteScheduler,
    KDPM2DiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    LMSDiscreteScheduler,
)
SHAPE = (1, 4, 6, 6)
SEED = 11


def predicted(sample: Tensor, timestep: Tensor) -> Tensor:
    """What a model makes of its input at a timestep: of its size, smooth, and another one at another timestep."""
    moved = torch.roll(sample, 1, dims=-1)
    return 0.6 * torch.tanh(sample) + 0.3 * torch.sin(moved + float(timestep) / 90)


@torch.inference_mode()
def stock_latent(scheduler: Any, steps: int, *, strength: float | None = None, **custom: Any) -> Tensor:
    """Return the finished latent of Diffusers' pipelines.

    Source: StableDiffusionXLPipeline and StableDiffusionXLImg2ImgPipeline, from `retrieve_timesteps` on; for flow
    matching the pipelines of Stable Diffusion 3.

    Args:
        scheduler: A scheduler of Diffusers.
        steps: Number of denoising steps.
        strength: How much of a source is redrawn; None draws from noise alone.
        custom: The pipelines' `timesteps` or `sigmas`.
    """
    generator = torch.Generator("cpu").manual_seed(SEED)
    scheduler.set_timesteps(**(custom or {"num_inference_steps": steps}))
    timesteps: Tensor = scheduler.timesteps
    begin = 0
    if strength is not None:
        kept = steps * strength if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) else int(steps * strength)
        begin = int(max(steps - min(kept, steps), 0))
        timesteps = timesteps[begin * scheduler.order :]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin * scheduler.order)
    noise = torch.randn(SHAPE, generator=generator)
    latent: Tensor = noise * scheduler.init_noise_sigma
    if strength is not None:
        latent = scheduler.add_noise(source(), noise, timesteps[:1])
    accepted = scheduler.step.__code__.co_varnames
    extra = {name: value for name, value in (("generator", generator), ("eta", 0.0)) if name in accepted}
    for timestep in timesteps:
        noise = predicted(scheduler.scale_model_input(latent, timestep), timestep)
        latent = scheduler.step(noise, timestep, latent, **extra, return_dict=False)[0]
    return latent


@torch.inference_mode()
def our_latent(
    samplers: ModelSamplers,
    choice: SamplerChoice,
    steps: int,
    *,
    strength: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the finished latent of a model's sampler, made as the engine makes it.

    Args:
        samplers: Of the model.
        choice: The sampler.
        steps: Number of denoising steps.
        strength: How much of a source is redrawn; None draws from noise alone.
        generator: Of the request, at SEED; one is made without it.
    """
    generator = generator or torch.Generator("cpu").manual_seed(SEED)
    flows = choice.kind is SamplerKind.FLOW_MATCH_EULER
    begin = steps - steps_to_run(steps, strength, flows=flows)
    sampler = samplers.open(choice, steps=steps, begin=begin)
    noise = torch.randn(SHAPE, generator=generator)
    first = sampler.first_evaluation
    latent = noise * sampler.init_noise_sigma if strength is None else sampler.add_noise(source(), noise, first)
    for evaluation in range(first, sampler.evaluations):
        noise = predicted(sampler.model_input(latent, evaluation), sampler.timestep(evaluation))
        latent = sampler.step(noise, evaluation, latent, generator)[0]
    return latent


def stock_scheduler(kind: Any, config: Mapping[str, Any], **overrides: Any) -> Any:
    """Return `kind.from_config(config, **overrides)` of a pipeline's scheduler configuration."""
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):  # Diffusers' advice, and what it asks of NumPy
            warnings.simplefilter("ignore", category)
        if kind is FlowMatchEulerDiscreteScheduler:
            kind = _Flows
        if not issubclass(kind, _TRAINED_FIRST):
            return kind.from_config(config, **overrides)
        with patch.object(kind, "set_timesteps", _no_timesteps):
            return kind.from_config(config, **overrides)


class _Flows(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """What the pipelines of Stable Diffusion 3 do with it, by the names that other schedulers have."""

    init_noise_sigma = 1.0

    def set_timesteps(self, num_inference_steps: int, **custom: Any) -> None:
        # A picture with the fewest tokens.
        shift = {"mu": self.config.base_shift} if self.config.use_dynamic_shifting else {}
        super().set_timesteps(num_inference_steps, **shift, **custom)

    def scale_model_input(self, sample: Tensor, timestep: Tensor) -> Tensor:
        return sample

    def add_noise(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        noised: Tensor = self.scale_noise(sample, timesteps, noise)
        return noised


def _no_timesteps(scheduler: Any, *_: object) -> None:
    scheduler.sigmas = torch.empty(0)


def source() -> Tensor:
    """Return the latent of a picture."""
    return torch.randn(SHAPE, generator=torch.Generator("cpu").manual_seed(3))
