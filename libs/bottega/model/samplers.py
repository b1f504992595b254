"""The sampler of one request: a Diffusers scheduler of its own, whose state can be saved and restored."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bottega.device.devices import open_device
from bottega.model.operations import EulerStep
from bottega.model.schedulers import (
    RUNGE_KUTTA_STEPS,
    TWICE,
    FlowSchedule,
    SamplerKind,
    ancestral_step,
    draws_noise,
    make_scheduler,
    set_timesteps,
)
from bottega.schedules import AS_CONFIGURED, Schedule

_FEWEST_TOKENS = FlowSchedule()
# Samplers compute the noise of a timestep in different orders, with results that differ by about 1e-6.
_SAME_NOISE = 1e-5

# When nothing of the picture is left, Diffusers' samplers use a signal of 2**-12 to keep its inverse finite.
_LEAST_SIGNAL = 2.0**-12

# Samplers that draw no noise at the last step.
_QUIET_AT_LAST = frozenset({SamplerKind.DDPM, SamplerKind.LCM, SamplerKind.KDPM2_ANCESTRAL})

# Samplers that read the noise of a latent from the timestep; they know no sigmas.
_BY_TIMESTEP = frozenset({SamplerKind.DDIM, SamplerKind.DDPM, SamplerKind.LCM, SamplerKind.TCD, SamplerKind.PNDM})

# Samplers whose schedulers do not know where they begin: they derive their place from the timestep or, as PNDM, from
# the evaluations that they have made. The others count evaluations from the first one.
_UNCOUNTED = frozenset({SamplerKind.DDIM, SamplerKind.DDPM, SamplerKind.PNDM})

# Samplers whose second evaluation in a step is at a noise level between those of two steps.
_INTERPOLATING = frozenset({SamplerKind.KDPM2, SamplerKind.KDPM2_ANCESTRAL})

# Samplers that have sigmas, and latents of variance 1: a x0 + s n with a^2 + s^2 = 1. Latents of the others with sigmas
# are x0 + sigma n.
_VARIANCE_KEPT = frozenset(
    {SamplerKind.DPMPP_2M, SamplerKind.DPMPP_2M_SDE, SamplerKind.DPMPP_2S, SamplerKind.DEIS, SamplerKind.UNIPC}
)

# Samplers that were made for models trained with EDM's noise levels.
_EDM = frozenset({SamplerKind.EDM_EULER, SamplerKind.EDM_DPMPP_2M})

# Samplers whose schedulers return the estimate of the finished latent beside the next latent.
_ESTIMATING = frozenset(
    {
        SamplerKind.EULER,
        SamplerKind.DDIM,
        SamplerKind.DDPM,
        SamplerKind.LMS,
        SamplerKind.LCM,
        SamplerKind.EDM_EULER,
        SamplerKind.HEUN,
        SamplerKind.KDPM2,
        SamplerKind.KDPM2_ANCESTRAL,
    }
)

# Attributes in which a scheduler keeps what later steps need: tensors, lists of tensors, and numbers.
_MULTISTEP = ("model_outputs", "lower_order_nums")
_STATE: Mapping[SamplerKind, tuple[str, ...]] = {
    SamplerKind.DPMPP_2M: _MULTISTEP,
    SamplerKind.DPMPP_2M_SDE: _MULTISTEP,
    SamplerKind.DPMPP_2S: ("model_outputs", "sample"),
    SamplerKind.DEIS: _MULTISTEP,
    SamplerKind.UNIPC: (*_MULTISTEP, "last_sample", "this_order"),
    SamplerKind.LMS: ("derivatives",),
    SamplerKind.EDM_DPMPP_2M: _MULTISTEP,
    SamplerKind.PNDM: ("counter", "cur_model_output", "cur_sample", "ets"),
    SamplerKind.HEUN: ("sample", "prev_derivative", "dt"),
    SamplerKind.KDPM2: ("sample",),
    SamplerKind.KDPM2_ANCESTRAL: ("sample",),
}

# Earlier derivatives that LMS uses at most, in Diffusers' pipelines.
_LMS_ORDER = 4

# Schedulers that read all entries of model_outputs. The others drop the oldest one before they read.
_READ_OLDEST = frozenset({SamplerKind.UNIPC})


def same_noise(level: float, other: float) -> bool:
    """Return whether two results of `Sampler.noise_level` differ only by the order in which samplers compute them."""
    return math.isclose(level, other, rel_tol=_SAME_NOISE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerState:
    """The state of a sampler between two evaluations of the network."""

    tensors: dict[str, Tensor]
    """Tensors by name."""
    numbers: dict[str, int]
    """Other numbers by name."""


class Sampler:
    """A Diffusers scheduler with its schedule, for one request.

    The schedule lists evaluations of the network, as `scheduler.timesteps` does. Most samplers make one for each step.
    Heun and KDPM2 evaluate the network twice in each step but the last. PNDM evaluates it twice in the first step, or
    four times in each of the first three.

    The scheduler keeps everything on the CPU; latents may be on any device.

    Args:
        kind: The sampler.
        config: The model's scheduler configuration. The scheduler is made from it as by
            `Kind.from_config(pipe.scheduler.config)`.
        steps: Number of denoising steps.
        begin: The first step that is made.
        karras: Whether to use Karras' sigmas; None: as in `config`. Samplers outside KARRAS ignore it.
        schedule: Other changes of the schedule.
        flow: Properties that set the schedule for flow matching.
        restarts: Whether step `begin` continues from the latent of another picture. LMS then begins with order 1. It
            otherwise uses the order of that step, although the steps before were skipped, as Diffusers' image-to-image
            does.
    """

    def __init__(
        self,
        kind: SamplerKind,
        config: Mapping[str, Any],
        *,
        steps: int,
        begin: int = 0,
        karras: bool | None = None,
        schedule: Schedule = AS_CONFIGURED,
        flow: FlowSchedule = _FEWEST_TOKENS,
        restarts: bool = False,
    ) -> None:
        self._kind = kind
        self._scheduler = make_scheduler(kind, config, schedule.overrides(kind.value, karras))
        self._flows = kind is SamplerKind.FLOW_MATCH_EULER
        set_timesteps(self._scheduler, schedule, flow, steps=steps)
        self._draws = draws_noise(kind, config)
        self._restarts = restarts
        self.steps = steps
        self.evaluations = len(self._scheduler.timesteps)
        """Number of entries of the schedule. Image-to-image and cached starts skip the first of them."""
        # Diffusers' image-to-image skips as many entries for each step as the scheduler's order is.
        self.first_evaluation: int = begin * self._scheduler.order
        """The first evaluation that is made."""
        self._firsts = self._first_evaluations(begin)
        self._begin_at(self.first_evaluation)

    @property
    def init_noise_sigma(self) -> float:
        """Factor of a standard normal latent before step 0."""
        return 1.0 if self._flows else float(self._scheduler.init_noise_sigma)

    def evaluation_of(self, step: int) -> int:
        """Return the first evaluation of a step; `evaluations` for the step after the last one."""
        return self.evaluations if step >= self.steps else self._firsts[step]

    def step_of(self, evaluation: int) -> int:
        """Return the step that an evaluation belongs to, which is the number of steps that are finished before it."""
        if evaluation >= self.evaluations:
            return self.steps
        return bisect_right(self._firsts, evaluation) - 1

    def timestep(self, evaluation: int) -> Tensor:
        """Return the timestep of an evaluation, a scalar."""
        timestep: Tensor = self._scheduler.timesteps[evaluation]
        return timestep

    def signal(self, evaluation: int) -> float:
        """Return the factor of the picture in the latent before an evaluation; `evaluations` is after the last one.

        Divided by it, the latents of all samplers at one timestep agree: the picture, plus noise of one deviation. It
        is never 0; when nothing of the picture is left, it is the smallest value that Diffusers' samplers use.
        """
        return 1.0 if evaluation == self.evaluations else max(self._noise_level(evaluation)[0], _LEAST_SIGNAL)

    def noise_level(self, evaluation: int) -> float:
        """Return the standard deviation of the noise before a evaluation, in a latent whose picture has factor 1.

        Together with the timestep it determines the input of the model for any sampler: DPM++ rounds the timesteps of
        Karras' sigmas, so that several levels have the same one. All samplers return the same number for the level that
        a timestep had in training.
        """
        timestep, (signal, deviation) = float(self.timestep(evaluation)), self._noise_level(evaluation)
        level = deviation / max(signal, _LEAST_SIGNAL)
        if self._kind in _EDM or self._flows:
            return level
        kept = self._scheduler.alphas_cumprod
        if timestep.is_integer() and 0 <= timestep < len(kept):
            trained = float(kept[int(timestep)])
            trained_level = math.sqrt(1.0 - trained) / max(math.sqrt(trained), _LEAST_SIGNAL)
            if same_noise(level, trained_level):
                return trained_level
        return level

    def add_noise(self, latent: Tensor, noise: Tensor, evaluation: int) -> Tensor:
        """Return a latent with the noise level of `evaluation`, as image-to-image starts.

        This computes what Diffusers' `add_noise` does, which however copies all noise levels to the latent's device and
        waits.
        """
        if self._kind in _BY_TIMESTEP:
            kept: Tensor = self._scheduler.alphas_cumprod[int(self.timestep(evaluation))].to(latent.dtype)
            return kept**0.5 * latent + (1 - kept) ** 0.5 * noise
        sigma: Tensor = self._scheduler.sigmas[evaluation].to(latent.dtype)
        if self._flows:
            noised: Tensor = sigma * noise + (1.0 - sigma) * latent
            return noised
        if self._kind in _VARIANCE_KEPT:
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
        signal, deviation = self._noise_level(self.evaluation_of(step))
        signal_before, deviation_before = self._noise_level(self.evaluation_of(step - 1))
        scale = signal_before / signal
        fresh = math.sqrt(max(0.0, deviation_before**2 - (scale * deviation) ** 2))
        return scale * latent + fresh * noise

    def model_input(self, latent: Tensor, evaluation: int) -> Tensor:
        """Return the latent scaled for the model's input. It may be called again for the same evaluation."""
        if self._flows:
            return latent
        scaled: Tensor = self._scheduler.scale_model_input(latent, self.timestep(evaluation))
        return scaled

    def step(
        self, noise: Tensor, evaluation: int, latent: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Return the next latent, and an estimate of the finished latent.

        Args:
            noise: The model's prediction, [1, channels, height, width].
            evaluation: The evaluation to make.
            latent: The latent before the evaluation, in the same shape.
            generator: On the CPU; samplers that draw noise draw it from here, as Diffusers' pipelines do.
        """
        if self._kind is SamplerKind.EULER_ANCESTRAL:
            made = ancestral_step(self._scheduler, evaluation, noise, latent, generator)
            self.count_step()
            return made
        extra: dict[str, Any] = {}
        if self._kind in {SamplerKind.DPMPP_2M, SamplerKind.DPMPP_2M_SDE}:
            if self._draws:
                # Diffusers draws float32 on the CPU, where the generator is, and its thread waits while it is copied.
                drawn = torch.randn(noise.shape, generator=generator)
                extra["variance_noise"] = open_device(noise.device).to_device(drawn)
        elif self._draws:
            extra["generator"] = generator
        elif self._kind is SamplerKind.LMS and self._restarts:
            extra["order"] = min(len(self._scheduler.derivatives) + 1, _LMS_ORDER)
        elif self._kind is SamplerKind.TCD:
            extra["eta"] = 0.0  # as Diffusers' pipelines have it
        made = self._scheduler.step(noise, self.timestep(evaluation), latent, **extra, return_dict=False)
        return made[0], made[1] if self._kind in _ESTIMATING else self._estimate(noise, evaluation, latent)

    def skip_noise(self, steps: int, shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> None:
        """Advance the generator by the draws of `steps` steps.

        Args:
            shape: Shape of the latent.
            dtype: Element type of the model's predictions.
        """
        if not self._draws:
            return
        drawn = torch.float32 if self._kind in {SamplerKind.DPMPP_2M, SamplerKind.DPMPP_2M_SDE} else dtype
        for step in range(steps):
            last = float(self.timestep(step)) <= 0 if self._kind is SamplerKind.DDPM else step == self.steps - 1
            if not (last and self._kind in _QUIET_AT_LAST):
                torch.randn(tuple(shape), generator=generator, dtype=drawn)

    def euler_step(self, evaluation: int) -> EulerStep | None:
        """Return the parameters of an Euler step, for code that computes it itself; None for other samplers.

        Such code then calls `count_step`.
        """
        prediction = self._scheduler.config.prediction_type if self._kind is SamplerKind.EULER else ""
        if prediction not in {"epsilon", "v_prediction"}:
            return None
        sigma, next_sigma = (float(level) for level in self._scheduler.sigmas[evaluation : evaluation + 2])
        return EulerStep(sigma=sigma, next_sigma=next_sigma, velocity=prediction == "v_prediction")

    def count_step(self) -> None:
        """Advance the sampler by the evaluation for which `model_input` was last called."""
        self._scheduler._step_index += 1

    def state(self) -> SamplerState:
        """Return the state for `restore`, without the evaluation.

        Only samplers that look back at earlier evaluations have any.
        """
        state = SamplerState(tensors={}, numbers={"restarts": 1} if self._restarts else {})
        for name in _STATE.get(self._kind, ()):
            value = getattr(self._scheduler, name, None)
            if isinstance(value, list):
                state.numbers[name] = len(value)
                first = 1 if name == "model_outputs" and self._kind not in _READ_OLDEST else 0
                kept = {f"{name}.{index}": each for index, each in enumerate(value) if index >= first}
                state.tensors.update({key: each for key, each in kept.items() if each is not None})
            elif isinstance(value, Tensor):
                # PNDM adds to its sum in place, while the state may still be copied.
                state.tensors[name] = value.clone() if name == "cur_model_output" else value
            elif value is not None:
                state.numbers[name] = value
        return state

    def restore(self, state: SamplerState, evaluation: int, device: torch.device) -> None:
        """Continue before `evaluation` as if the earlier ones had been made by this sampler.

        Raises:
            ValueError: The state is that of another sampler.
        """
        self._begin_at(evaluation)
        names = _STATE.get(self._kind, ())
        stateless = self._kind in TWICE and self.evaluation_of(self.step_of(evaluation)) == evaluation
        if names and not stateless and not (state.numbers.keys() | state.tensors.keys()) & set(names):
            raise ValueError("the state of a multi-step sampler is missing")
        self._restarts = "restarts" in state.numbers
        # Diffusers computes noise levels on the CPU. A CUDA device would round such a number to the type of the latent.
        tensors = {name: tensor.to(device) if tensor.dim() else tensor for name, tensor in state.tensors.items()}
        for name in names:
            if isinstance(getattr(self._scheduler, name, None), list):
                value = [tensors.get(f"{name}.{index}") for index in range(state.numbers[name])]
                setattr(self._scheduler, name, value)
            elif name in tensors or name in state.numbers:
                setattr(self._scheduler, name, tensors.get(name, state.numbers.get(name)))

    def _estimate(self, predicted: Tensor, evaluation: int, latent: Tensor) -> Tensor:
        """Return the finished latent that a prediction for the latent before an evaluation implies."""
        if self._kind is SamplerKind.EDM_DPMPP_2M:
            estimate: Tensor = self._scheduler.model_outputs[-1]
            return estimate
        signal, deviation = self._noise_level(evaluation)
        prediction = "flow_prediction" if self._flows else self._scheduler.config.prediction_type
        if prediction == "sample":
            return predicted
        if prediction == "v_prediction":
            return signal * latent - deviation * predicted
        if prediction == "flow_prediction":
            return latent - deviation * predicted
        return (latent - deviation * predicted) / max(signal, _LEAST_SIGNAL)

    def _noise_level(self, evaluation: int) -> tuple[float, float]:
        """Return the factor of the picture in the latent before an evaluation, and its noise's standard deviation."""
        if self._kind in _BY_TIMESTEP:
            kept = float(self._scheduler.alphas_cumprod[int(self.timestep(evaluation))])
            return math.sqrt(kept), math.sqrt(1.0 - kept)
        sigma = self._scheduler.sigmas[evaluation]
        if self._kind in _INTERPOLATING and evaluation % 2:
            # Its second evaluation is between two steps. Diffusers' add_noise does not know of it.
            sigma = self._scheduler.sigmas_interpol[evaluation - (self._kind is SamplerKind.KDPM2_ANCESTRAL)]
        if self._kind in _VARIANCE_KEPT:
            signal, deviation = self._scheduler._sigma_to_alpha_sigma_t(sigma)
            return float(signal), float(deviation)
        return (1.0 - float(sigma) if self._flows else 1.0), float(sigma)

    def _first_evaluations(self, begin: int) -> list[int]:
        """Return the first evaluation of each step, if step `begin` is the first one that is made."""
        # The first `several` steps that are made take so many evaluations each; the others one.
        several, evaluations = 0, 1
        if self._kind in TWICE:
            several, evaluations = self.steps, 2
        elif self._kind is SamplerKind.PNDM:
            several, evaluations = (1, 2) if self._scheduler.config.skip_prk_steps else (RUNGE_KUTTA_STEPS, 4)
        skipped = [self._scheduler.order * step for step in range(begin)]
        made = range(self.steps - begin)
        return skipped + [
            self.first_evaluation + evaluations * min(step, several) + max(0, step - several) for step in made
        ]

    def _begin_at(self, evaluation: int) -> None:
        if self._kind not in _UNCOUNTED:
            self._scheduler.set_begin_index(evaluation)
