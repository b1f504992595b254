"""One request's sampler: a Diffusers scheduler of its own, with state that can travel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
)
from torch import Tensor

from bottega.diffusion.model.ancestral import ancestral_step
from bottega.diffusion.operations import EulerStep


class SamplerKind(Enum):
    """The samplers that are served, by the Diffusers class behind each."""

    EULER = EulerDiscreteScheduler
    EULER_ANCESTRAL = EulerAncestralDiscreteScheduler
    DDIM = DDIMScheduler
    DPMPP_2M = DPMSolverMultistepScheduler


# Those whose Diffusers class takes use_karras_sigmas.
KARRAS = frozenset({SamplerKind.EULER, SamplerKind.DPMPP_2M})

# Of two samplers one computes the noise of a timestep in another order than the other: they differ by some 1e-6.
_SAME_NOISE = 1e-5

# Where nothing of the picture is left, Diffusers' samplers count with a signal of 2**-12 lest its inverse be endless.
_LEAST_SIGNAL = 2.0**-12

# Those that draw noise at every step.
_ANCESTRAL = frozenset({SamplerKind.EULER_ANCESTRAL})


def draws_noise(kind: SamplerKind) -> bool:
    """Whether its steps draw noise; else the first latent decides all of a picture."""
    return kind in _ANCESTRAL


def same_noise(level: float, other: float) -> bool:
    """Whether two of `Sampler.noise_level` are one, but for the order in which samplers compute them."""
    return math.isclose(level, other, rel_tol=_SAME_NOISE)


def first_step_from(kind: SamplerKind, steps: int) -> int:
    """The first step of a picture that begins with another one's latent after so many steps.

    A sampler that draws no noise would make the other picture's composition again, so that one step of noise is given
    back to the latent, and made once more.
    """
    return steps if draws_noise(kind) else steps - 1


def default_kind(config: Mapping[str, Any]) -> SamplerKind:
    """The sampler that a model's scheduler_config.json names; EULER where that one is not served."""
    name = config.get("_class_name")
    return next((kind for kind in SamplerKind if kind.value.__name__ == name), SamplerKind.EULER)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """What a sampler remembers between steps: tensors by name, and plain numbers."""

    tensors: dict[str, Tensor]
    numbers: dict[str, int]


class Sampler:
    """A Diffusers scheduler from `config`, with `steps` timesteps, that starts at index `begin`.

    config: the model's scheduler config; kind and use_karras_sigmas override it, as
    `Kind.from_config(pipe.scheduler.config, use_karras_sigmas=...)` does.
    Everything the scheduler keeps lies on the CPU; latents may lie anywhere.
    """

    def __init__(
        self, kind: SamplerKind, config: Mapping[str, Any], *, steps: int, begin: int = 0, karras: bool = False
    ) -> None:
        overrides: dict[str, Any] = {"use_karras_sigmas": karras} if kind in KARRAS else {}
        self._kind = kind
        self._scheduler = kind.value.from_config(dict(config), **overrides)
        self._scheduler.set_timesteps(steps)
        self._begin_at(begin)
        # Diffusers counts in timesteps; all kinds served here are of order 1: one timestep a step.
        self.steps = len(self._scheduler.timesteps)

    @property
    def init_noise_sigma(self) -> float:
        """What a standard normal latent is multiplied by before step 0."""
        return float(self._scheduler.init_noise_sigma)

    def timestep(self, step: int) -> Tensor:
        """The timestep of a step, a scalar."""
        timestep: Tensor = self._scheduler.timesteps[step]
        return timestep

    def signal(self, step: int) -> float:
        """What the picture is multiplied by in the latent before a step; `steps` is after the last one.

        Divided by it, all samplers' latents at one timestep are alike: the picture, and noise of one deviation.
        """
        return 1.0 if step == self.steps else self._noise_level(step)[0]

    def noise_level(self, step: int) -> float:
        """Standard deviation of the noise before a step, of a latent whose picture is multiplied by 1.

        With the timestep it says what the model is given, whatever the sampler: DPM++ rounds the timesteps of Karras'
        sigmas, so that several levels have one. All samplers that have the level that a timestep had in training say
        the same number.
        """
        timestep, (signal, deviation) = float(self.timestep(step)), self._noise_level(step)
        level = deviation / max(signal, _LEAST_SIGNAL)
        kept = self._scheduler.alphas_cumprod
        if timestep.is_integer() and 0 <= timestep < len(kept):
            trained = float(kept[int(timestep)])
            trained_level = math.sqrt(1.0 - trained) / max(math.sqrt(trained), _LEAST_SIGNAL)
            if same_noise(level, trained_level):
                return trained_level
        return level

    def add_noise(self, latent: Tensor, noise: Tensor, step: int) -> Tensor:
        """The latent at the noise level of `step`, as image-to-image starts.

        As Diffusers' `add_noise` computes it; but that copies all noise levels to the latent's device, and waits there.
        """
        if self._kind is SamplerKind.DDIM:
            kept: Tensor = self._scheduler.alphas_cumprod[int(self.timestep(step))].to(latent.dtype)
            return kept**0.5 * latent + (1 - kept) ** 0.5 * noise
        sigma: Tensor = self._scheduler.sigmas[step].to(latent.dtype)
        if self._kind is SamplerKind.DPMPP_2M:
            levels: tuple[Tensor, Tensor] = self._scheduler._sigma_to_alpha_sigma_t(sigma)
            return levels[0] * latent + levels[1] * noise
        return latent + noise * sigma

    def renoise(self, latent: Tensor, noise: Tensor, step: int) -> Tensor:
        """The latent before `step`, which is not the first one, at the noise level of the step before it.

        noise: standard normal. What the latent has of a picture is scaled as that level has it, and the variance of its
        noise is that level's: x[k-1] = a[k-1]/a[k] x[k] + sqrt(s[k-1]^2 - (a[k-1]/a[k] s[k])^2) n, where a latent is
        a x0 + s n.
        """
        signal, deviation = self._noise_level(step)
        signal_before, deviation_before = self._noise_level(step - 1)
        scale = signal_before / signal
        fresh = math.sqrt(max(0.0, deviation_before**2 - (scale * deviation) ** 2))
        return scale * latent + fresh * noise

    def model_input(self, latent: Tensor, step: int) -> Tensor:
        """The latent as the model takes it; calling it again for the same step changes nothing."""
        scaled: Tensor = self._scheduler.scale_model_input(latent, self.timestep(step))
        return scaled

    def step(
        self, noise: Tensor, step: int, latent: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """The next latent, and the estimate of the finished one that the step was made from."""
        if self._kind is SamplerKind.EULER_ANCESTRAL:
            made = ancestral_step(self._scheduler, step, noise, latent, generator)
            self.count_step()
            return made
        made = self._scheduler.step(noise, self.timestep(step), latent, return_dict=False)
        estimate = self._scheduler.model_outputs[-1] if self._kind is SamplerKind.DPMPP_2M else made[1]
        return made[0], estimate

    def euler_step(self, step: int) -> EulerStep | None:
        """For who makes this step in another way, and says so by `count_step`; None where it is not Euler's."""
        prediction = self._scheduler.config.prediction_type if self._kind is SamplerKind.EULER else ""
        if prediction not in {"epsilon", "v_prediction"}:
            return None
        sigma, next_sigma = (float(each) for each in self._scheduler.sigmas[step : step + 2])
        return EulerStep(sigma=sigma, next_sigma=next_sigma, velocity=prediction == "v_prediction")

    def count_step(self) -> None:
        """The step for which `model_input` was asked last is made."""
        self._scheduler._step_index += 1

    def state(self) -> SamplerState:
        """What `restore` needs beside the step. Only multi-step samplers remember anything."""
        if self._kind is not SamplerKind.DPMPP_2M:
            return SamplerState(tensors={}, numbers={})
        # Of second order, it looks back at the last output alone; the one before that is dropped by the next step.
        last = self._scheduler.model_outputs[-1]
        tensors = {} if last is None else {"model_output": last}
        return SamplerState(tensors=tensors, numbers={"lower_order_nums": self._scheduler.lower_order_nums})

    def restore(self, state: SamplerState, step: int, device: torch.device) -> None:
        """Continues before `step` as if the steps before it had been made here.

        Raises ValueError when the state is another sampler's.
        """
        self._begin_at(step)
        if self._kind is SamplerKind.DPMPP_2M:
            last = state.tensors.get("model_output")
            self._scheduler.model_outputs[-1] = None if last is None else last.to(device)
            if "lower_order_nums" not in state.numbers:
                raise ValueError("the state of a multi-step sampler is missing")
            self._scheduler.lower_order_nums = state.numbers["lower_order_nums"]

    def _noise_level(self, step: int) -> tuple[float, float]:
        """Of the latent before a step: what the picture is multiplied by, and the noise's standard deviation."""
        if self._kind is SamplerKind.DDIM:
            kept = float(self._scheduler.alphas_cumprod[int(self.timestep(step))])
            return math.sqrt(kept), math.sqrt(1.0 - kept)
        sigma = self._scheduler.sigmas[step]
        if self._kind is SamplerKind.DPMPP_2M:
            signal, deviation = self._scheduler._sigma_to_alpha_sigma_t(sigma)
            return float(signal), float(deviation)
        return 1.0, float(sigma)

    def _begin_at(self, step: int) -> None:
        # DDIM finds its place by the timestep; the others count, from here on.
        if self._kind is not SamplerKind.DDIM:
            self._scheduler.set_begin_index(step)
