"""The sampler of one request: a Diffusers scheduler of its own, whose state can be saved and restored."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

from bottega.device.pick import open_device
from bottega.model.operations import EulerStep
from bottega.model_files.scheduler_rules import takes_karras_sigmas


class SamplerKind(Enum):
    """The samplers that are supported, by their Diffusers class."""

    EULER = EulerDiscreteScheduler
    EULER_ANCESTRAL = EulerAncestralDiscreteScheduler
    DDIM = DDIMScheduler
    DPMPP_2M = DPMSolverMultistepScheduler


KARRAS = frozenset(kind for kind in SamplerKind if takes_karras_sigmas(kind.value.__name__))
"""Samplers whose Diffusers class accepts use_karras_sigmas."""

# Samplers compute the noise of a timestep in different orders, with results that differ by about 1e-6.
_SAME_NOISE = 1e-5

# When nothing of the picture is left, Diffusers' samplers use a signal of 2**-12 to keep its inverse finite.
_LEAST_SIGNAL = 2.0**-12

# Prefix of the model's outputs in a sampler's state, by their age in steps: model_output.1 is the newest.
_MODEL_OUTPUT = "model_output."

# Values of algorithm_type with which DPMSolverMultistepScheduler draws noise at every step.
_STOCHASTIC_ALGORITHMS = frozenset({"sde-dpmsolver", "sde-dpmsolver++"})

# Values of algorithm_type with which it keeps predicted noise in model_outputs instead of the predicted picture.
_NOISE_ALGORITHMS = frozenset({"dpmsolver", "sde-dpmsolver"})


def draws_noise(kind: SamplerKind, config: Mapping[str, Any]) -> bool:
    """Return whether each step of a sampler draws noise. Otherwise the first latent determines the picture.

    Args:
        kind: The sampler.
        config: The model's scheduler configuration, which can make DPM++ stochastic.
    """
    if kind is SamplerKind.DPMPP_2M:
        return config.get("algorithm_type") in _STOCHASTIC_ALGORITHMS
    return kind is SamplerKind.EULER_ANCESTRAL


def same_noise(level: float, other: float) -> bool:
    """Return whether two results of `Sampler.noise_level` differ only by the order in which samplers compute them."""
    return math.isclose(level, other, rel_tol=_SAME_NOISE)


def default_kind(config: Mapping[str, Any]) -> SamplerKind:
    """Return the sampler whose class a model's scheduler configuration names.

    Raises:
        ValueError: That class is not supported.
    """
    name = config.get("_class_name")
    kind = next((kind for kind in SamplerKind if kind.value.__name__ == name), None)
    if kind is None:
        raise ValueError(f"the scheduler {name} is not supported")
    return kind


@contextmanager
def ignored_algorithm_advice() -> Iterator[None]:
    """Silence Diffusers' advice to replace `dpmsolver` by `dpmsolver++`, which would change the picture."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*algorithm_types dpmsolver and sde-dpmsolver", FutureWarning)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """The state of a sampler between steps."""

    tensors: dict[str, Tensor]
    """Tensors by name."""
    numbers: dict[str, int]
    """Other numbers by name."""


class Sampler:
    """A Diffusers scheduler with its schedule, for one request.

    The scheduler keeps everything on the CPU; latents may be on any device.

    Args:
        kind: The sampler.
        config: The model's scheduler configuration. The scheduler is made from it as by
            `Kind.from_config(pipe.scheduler.config)`.
        steps: Number of denoising steps.
        begin: The first step that is made.
        karras: Whether to use Karras' sigmas; None: as in `config`. Samplers outside KARRAS ignore it.
    """

    def __init__(
        self,
        kind: SamplerKind,
        config: Mapping[str, Any],
        *,
        steps: int,
        begin: int = 0,
        karras: bool | None = None,
    ) -> None:
        overrides: dict[str, Any] = {"use_karras_sigmas": karras} if karras is not None and kind in KARRAS else {}
        self._kind = kind
        self._scheduler = make_scheduler(kind, config, overrides)
        self._scheduler.set_timesteps(steps)
        self._begin_at(begin)
        # Diffusers counts timesteps. All kinds here are of order 1, with one timestep for each step.
        self.steps = len(self._scheduler.timesteps)

    @property
    def init_noise_sigma(self) -> float:
        """Factor of a standard normal latent before step 0."""
        return float(self._scheduler.init_noise_sigma)

    def timestep(self, step: int) -> Tensor:
        """Return the timestep of a step, a scalar."""
        timestep: Tensor = self._scheduler.timesteps[step]
        return timestep

    def signal(self, step: int) -> float:
        """Return the factor of the picture in the latent before a step; step `steps` is after the last one.

        Divided by it, the latents of all samplers at one timestep agree: the picture, plus noise of one deviation. It
        is never 0; when nothing of the picture is left, it is the smallest value that Diffusers' samplers use.
        """
        return 1.0 if step == self.steps else max(self._noise_level(step)[0], _LEAST_SIGNAL)

    def noise_level(self, step: int) -> float:
        """Return the standard deviation of the noise before a step, in a latent whose picture has factor 1.

        Together with the timestep it determines the input of the model for any sampler: DPM++ rounds the timesteps of
        Karras' sigmas, so that several levels have the same one. All samplers return the same number for the level that
        a timestep had in training.
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
        """Return a latent with the noise level of `step`, as image-to-image starts.

        This computes what Diffusers' `add_noise` does, which however copies all noise levels to the latent's device and
        waits.
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
        """Return the latent before `step`, which is not the first one, at the noise level of the step before it.

        The picture is scaled to that level, and noise is added to reach its variance: with latents a x0 + s n, x[k-1] =
        a[k-1]/a[k] x[k] + sqrt(s[k-1]^2 - (a[k-1]/a[k] s[k])^2) n.

        Args:
            latent: The latent before `step`.
            noise: Standard normal, in the same shape.
            step: The step.
        """
        signal, deviation = self._noise_level(step)
        signal_before, deviation_before = self._noise_level(step - 1)
        scale = signal_before / signal
        fresh = math.sqrt(max(0.0, deviation_before**2 - (scale * deviation) ** 2))
        return scale * latent + fresh * noise

    def model_input(self, latent: Tensor, step: int) -> Tensor:
        """Return the latent scaled for the model's input. It may be called again for the same step."""
        scaled: Tensor = self._scheduler.scale_model_input(latent, self.timestep(step))
        return scaled

    def step(
        self, noise: Tensor, step: int, latent: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return the next latent, and the estimate of the finished latent that the step was made from.

        Args:
            noise: The model's prediction, [1, channels, height, width].
            step: The step to make.
            latent: The latent before the step, in the same shape.
            generator: On the CPU; samplers that draw noise draw it from here, as Diffusers' pipelines do.
        """
        if self._kind is SamplerKind.EULER_ANCESTRAL:
            made = ancestral_step(self._scheduler, step, noise, latent, generator)
            self.count_step()
            return made
        if self._kind is SamplerKind.DPMPP_2M:
            return self._dpm_step(noise, step, latent, generator)
        made = self._scheduler.step(noise, self.timestep(step), latent, return_dict=False)
        return made[0], made[1]

    def skip_noise(self, steps: int, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> None:
        """Advance the generator by the draws of `steps` steps.

        Args:
            shape: Shape of the latent.
            dtype: Element type of the model's predictions.
        """
        if draws_noise(self._kind, self._scheduler.config):
            drawn = torch.float32 if self._kind is SamplerKind.DPMPP_2M else dtype
            for _ in range(steps):
                torch.randn(tuple(shape), generator=generator, dtype=drawn)

    def euler_step(self, step: int) -> EulerStep | None:
        """Return the parameters of an Euler step, for code that computes it itself; None for other samplers.

        Such code then calls `count_step`.
        """
        prediction = self._scheduler.config.prediction_type if self._kind is SamplerKind.EULER else ""
        if prediction not in {"epsilon", "v_prediction"}:
            return None
        sigma, next_sigma = (float(level) for level in self._scheduler.sigmas[step : step + 2])
        return EulerStep(sigma=sigma, next_sigma=next_sigma, velocity=prediction == "v_prediction")

    def count_step(self) -> None:
        """Advance the sampler by the step for which `model_input` was last called."""
        self._scheduler._step_index += 1

    def state(self) -> SamplerState:
        """Return the state for `restore`, without the step. Only multi-step samplers have any."""
        if self._kind is not SamplerKind.DPMPP_2M:
            return SamplerState(tensors={}, numbers={})
        tensors = {
            f"{_MODEL_OUTPUT}{age}": output
            for age, output in enumerate(reversed(self._outputs_looked_back_at()), 1)
            if output is not None
        }
        return SamplerState(tensors=tensors, numbers={"lower_order_nums": self._scheduler.lower_order_nums})

    def restore(self, state: SamplerState, step: int, device: torch.device) -> None:
        """Continue before `step` as if the earlier steps had been made by this sampler.

        Raises:
            ValueError: The state is that of another sampler.
        """
        self._begin_at(step)
        if self._kind is not SamplerKind.DPMPP_2M:
            return
        if "lower_order_nums" not in state.numbers:
            raise ValueError("the state of a multi-step sampler is missing")
        self._scheduler.lower_order_nums = state.numbers["lower_order_nums"]
        for age in range(1, len(self._outputs_looked_back_at()) + 1):
            output = state.tensors.get(f"{_MODEL_OUTPUT}{age}")
            self._scheduler.model_outputs[-age] = None if output is None else output.to(device)

    def _outputs_looked_back_at(self) -> Sequence[Tensor | None]:
        """Return the outputs of earlier steps that the next step reads, oldest first: the solver's order less one."""
        outputs: list[Tensor | None] = self._scheduler.model_outputs
        return outputs[1:]

    def _dpm_step(
        self, noise: Tensor, step: int, latent: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        algorithm = self._scheduler.config.algorithm_type
        drawn = None
        if algorithm in _STOCHASTIC_ALGORITHMS:
            # Diffusers draws float32 on the CPU, where the generator is, and its thread waits while it is copied.
            drawn = open_device(noise.device).to_device(torch.randn(noise.shape, generator=generator))
        following = self._scheduler.step(noise, self.timestep(step), latent, variance_noise=drawn, return_dict=False)[0]
        output: Tensor = self._scheduler.model_outputs[-1]
        if algorithm in _NOISE_ALGORITHMS:
            signal, deviation = self._scheduler._sigma_to_alpha_sigma_t(self._scheduler.sigmas[step])
            return following, (latent - deviation * output) / signal
        return following, output

    def _noise_level(self, step: int) -> tuple[float, float]:
        """Return the factor of the picture in the latent before a step, and the standard deviation of its noise."""
        if self._kind is SamplerKind.DDIM:
            kept = float(self._scheduler.alphas_cumprod[int(self.timestep(step))])
            return math.sqrt(kept), math.sqrt(1.0 - kept)
        sigma = self._scheduler.sigmas[step]
        if self._kind is SamplerKind.DPMPP_2M:
            signal, deviation = self._scheduler._sigma_to_alpha_sigma_t(sigma)
            return float(signal), float(deviation)
        return 1.0, float(sigma)

    def _begin_at(self, step: int) -> None:
        # DDIM derives its place from the timestep. The others count steps from here on.
        if self._kind is not SamplerKind.DDIM:
            self._scheduler.set_begin_index(step)


def make_scheduler(kind: SamplerKind, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return the Diffusers scheduler that `Kind.from_config(pipe.scheduler.config, **overrides)` makes."""
    with ignored_algorithm_advice():
        return kind.value.from_config(dict(config), **overrides)


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
