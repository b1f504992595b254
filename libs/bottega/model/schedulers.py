"""The samplers that are served, and the Diffusers schedulers that they are made of.

Some of Diffusers' schedulers import SciPy, which engine processes do not load, or do work that is not used. They are
replaced here by ones that compute the same.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias

import diffusers
import numpy as np
import torch
from diffusers.schedulers.scheduling_lms_discrete import LMSDiscreteScheduler
from numpy.typing import NDArray
from torch import Tensor

from bottega.device.devices import open_device
from bottega.model_files.scheduler_rules import SAMPLER_CLASSES, SAMPLER_OVERRIDES, takes_karras_sigmas
from bottega.planning import Pace
from bottega.schedules import Schedule


class SamplerKind(Enum):
    """The samplers that are supported, by the names in requests."""

    EULER = "euler"
    EULER_ANCESTRAL = "euler_ancestral"
    DDIM = "ddim"
    DPMPP_2M = "dpmpp_2m"
    DPMPP_2M_SDE = "dpmpp_2m_sde"
    DPMPP_2S = "dpmpp_2s"
    DDPM = "ddpm"
    DEIS = "deis"
    UNIPC = "unipc"
    LMS = "lms"
    LCM = "lcm"
    TCD = "tcd"
    EDM_EULER = "edm_euler"
    EDM_DPMPP_2M = "edm_dpmpp_2m"
    PNDM = "pndm"
    HEUN = "heun"
    KDPM2 = "kdpm2"
    KDPM2_ANCESTRAL = "kdpm2_ancestral"
    FLOW_MATCH_EULER = "flow_match_euler"

    @property
    def scheduler_class(self) -> Any:
        """The Diffusers class of its scheduler."""
        # Diffusers itself offers this one only where SciPy is installed, of which it needs one integral.
        return LMSDiscreteScheduler if self is SamplerKind.LMS else getattr(diffusers, SAMPLER_CLASSES[self.value])

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Scheduler configuration that makes this sampler of its class, in place of the model's."""
        return SAMPLER_OVERRIDES.get(self.value, {})


KARRAS = frozenset(kind for kind in SamplerKind if takes_karras_sigmas(kind.value))
"""Samplers whose Diffusers class accepts use_karras_sigmas."""

TWICE = frozenset({SamplerKind.HEUN, SamplerKind.KDPM2, SamplerKind.KDPM2_ANCESTRAL})
"""Samplers that evaluate the network twice in each step but the last."""

RUNGE_KUTTA_STEPS = 3
"""PNDM makes this many steps with Runge-Kutta's method, of four evaluations each, unless they are left out."""

# Samplers that draw noise at every step with some values of algorithm_type, and these values.
_SOLVERS = frozenset({SamplerKind.DPMPP_2M, SamplerKind.DPMPP_2M_SDE, SamplerKind.DPMPP_2S, SamplerKind.EDM_DPMPP_2M})
_STOCHASTIC_ALGORITHMS = frozenset({"sde-dpmsolver", "sde-dpmsolver++"})

# Both parameters of the distribution. Source: "Beta Sampling is All You Need", as in Diffusers' schedulers.
_SHAPE = 0.6
# Halvings of the interval from 0 to 1 that a quantile lies in: as many as bits count in a number between them.
_HALVINGS = 60
# The fraction below converges in some twenty terms.
_MAX_TERMS = 200
_PRECISION = 1e-15
_TINY = 1e-300
_LOG_NORM = 2 * math.lgamma(_SHAPE) - math.lgamma(2 * _SHAPE)


def draws_noise(kind: SamplerKind, config: Mapping[str, Any]) -> bool:
    """Return whether steps of a sampler draw noise. Otherwise the first latent determines the picture.

    Args:
        kind: The sampler.
        config: The model's scheduler configuration, which can make some samplers stochastic.
    """
    if kind in {SamplerKind.EULER_ANCESTRAL, SamplerKind.DDPM, SamplerKind.LCM, SamplerKind.KDPM2_ANCESTRAL}:
        return True
    return kind in _SOLVERS and {**config, **kind.overrides}.get("algorithm_type") in _STOCHASTIC_ALGORITHMS


def pace_of(kind: SamplerKind, config: Mapping[str, Any]) -> Pace:
    """Return how many evaluations a sampler makes with a model's scheduler configuration."""
    if kind in TWICE:
        return Pace(per_step=2, extra=-1)
    if kind is SamplerKind.PNDM:
        return Pace(extra=1 if config.get("skip_prk_steps") else 3 * RUNGE_KUTTA_STEPS)
    return Pace()


def default_kind(config: Mapping[str, Any]) -> SamplerKind:
    """Return the sampler whose class a model's scheduler configuration names.

    Raises:
        ValueError: That class is not supported.
    """
    name = config.get("_class_name")
    kind = next((kind for kind in SamplerKind if SAMPLER_CLASSES[kind.value] == name), None)
    if kind is None:
        raise ValueError(f"the scheduler {name} is not supported")
    return kind


def make_scheduler(kind: SamplerKind, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Any:
    """Return the Diffusers scheduler that `Kind.from_config(pipe.scheduler.config, **overrides)` makes."""
    with ignored_algorithm_advice():
        made = _WITHOUT_TRAINING_SCHEDULE.get(kind, kind.scheduler_class)
        wanted = {**config, **kind.overrides, **overrides}
        beta = bool(wanted.pop("use_beta_sigmas", False))
        scheduler = made.from_config(wanted)
    if beta and hasattr(scheduler.config, "use_beta_sigmas"):
        # Diffusers makes these only with SciPy.
        scheduler.register_to_config(use_beta_sigmas=True)
        scheduler._convert_to_beta = partial(_beta_sigmas, weakref.proxy(scheduler))
    if kind is SamplerKind.LMS:
        # A reference of the scheduler to itself would keep its tensors until a garbage collection.
        scheduler.get_lms_coefficient = partial(_lms_coefficient, weakref.proxy(scheduler))
    return scheduler


Sigmas: TypeAlias = Callable[[int], Sequence[float]]
"""Returns the noise level before each step, for a given number of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowSchedule:
    """The properties of a picture and its model that set the schedule for flow matching."""

    tokens: int = 0
    """Number of tokens of the picture, by which some schedules are shifted; 0 for the fewest."""
    sigmas: Sigmas | None = None
    """Returns unshifted noise levels for a number of steps; None if the scheduler computes them."""


def set_timesteps(scheduler: Any, schedule: Schedule, flow: FlowSchedule, *, steps: int) -> None:
    """Set the timesteps of a scheduler as Diffusers' pipelines do.

    Args:
        scheduler: The scheduler.
        schedule: Lists and strength of the request.
        flow: Used for flow matching.
        steps: Number of denoising steps.
    """
    own, flows = scheduler.config, type(scheduler) is diffusers.FlowMatchEulerDiscreteScheduler
    dynamic = flows and own["use_dynamic_shifting"]
    shift = {"mu": _flow_shift(own, flow.tokens or own["base_image_seq_len"])} if dynamic else {}
    if schedule.timesteps:
        scheduler.set_timesteps(timesteps=list(schedule.timesteps))
    elif schedule.sigmas:
        scheduler.set_timesteps(sigmas=list(schedule.sigmas))
    elif schedule.strength is not None:
        scheduler.set_timesteps(steps, strength=schedule.strength)
    elif flows and flow.sigmas is not None:
        scheduler.set_timesteps(sigmas=list(flow.sigmas(steps)), **shift)
    else:
        scheduler.set_timesteps(steps, **shift)


def _flow_shift(config: Mapping[str, Any], tokens: int) -> float:
    """Return the `mu` by which flow matching shifts a schedule to noisier steps the larger a picture is.

    Args:
        config: Configuration of the scheduler, with all defaults.
        tokens: Number of tokens of the picture, of patches of its latent.

    Source: calculate_shift of Diffusers' pipelines for SD3 and Flux.
    """
    shortest, longest = config["base_image_seq_len"], config["max_image_seq_len"]
    slope = (config["max_shift"] - config["base_shift"]) / (longest - shortest)
    shift: float = tokens * slope + (config["base_shift"] - slope * shortest)
    return shift


def ancestral_step(
    scheduler: diffusers.EulerAncestralDiscreteScheduler,
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


@contextmanager
def ignored_algorithm_advice() -> Iterator[None]:
    """Silence Diffusers' advice to replace `dpmsolver` by `dpmsolver++`, which would change the picture."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*algorithm_types dpmsolver and sde-dpmsolver", FutureWarning)
        yield


class _WithoutTrainingSchedule:
    """A part of a scheduler that makes no schedule of all timesteps of training when it is created.

    Diffusers' Heun and KDPM2 make one, which takes up to 0.3 s and is not used.
    """

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | None = None,
        num_train_timesteps: int | None = None,
        **custom: Any,
    ) -> None:
        """Set the schedule, as in Diffusers."""
        if num_train_timesteps is None:
            super().set_timesteps(num_inference_steps, device, **custom)  # type: ignore[misc]
        else:
            self.sigmas = torch.empty(0)


class _Heun(_WithoutTrainingSchedule, diffusers.HeunDiscreteScheduler):  # type: ignore[misc]
    pass


class _Kdpm2(_WithoutTrainingSchedule, diffusers.KDPM2DiscreteScheduler):  # type: ignore[misc]
    pass


class _Kdpm2Ancestral(_WithoutTrainingSchedule, diffusers.KDPM2AncestralDiscreteScheduler):  # type: ignore[misc]
    pass


class _Lms(LMSDiscreteScheduler):  # type: ignore[misc]
    """Makes no such schedule either. With converted sigmas, such as Karras', it takes 50 ms."""

    def set_timesteps(self, num_inference_steps: int, device: torch.device | None = None) -> None:
        """Set the schedule, as in Diffusers, but for the call of the constructor."""
        if hasattr(self, "derivatives"):  # the constructor sets them after its call
            super().set_timesteps(num_inference_steps, device)


_WITHOUT_TRAINING_SCHEDULE: Mapping[SamplerKind, Any] = {
    SamplerKind.HEUN: _Heun,
    SamplerKind.KDPM2: _Kdpm2,
    SamplerKind.KDPM2_ANCESTRAL: _Kdpm2Ancestral,
    SamplerKind.LMS: _Lms,
}


def _lms_coefficient(scheduler: LMSDiscreteScheduler, order: int, step: int, age: int) -> float:
    """Return the weight of an earlier derivative in a step of LMS, as `get_lms_coefficient` does with SciPy.

    It is the integral of a Lagrange polynomial of degree 3 or less, for which Gauss' rule with two points is exact.

    Args:
        scheduler: The scheduler, whose sigmas are those of the schedule.
        order: Number of derivatives that the step uses.
        step: Index of the step.
        age: Number of steps since the derivative was computed.
    """
    sigmas = [float(sigma) for sigma in scheduler.sigmas]

    def derivative(sigma: float) -> float:
        others = (earlier for earlier in range(order) if earlier != age)
        return math.prod((sigma - sigmas[step - k]) / (sigmas[step - age] - sigmas[step - k]) for k in others)

    half, middle = (sigmas[step + 1] - sigmas[step]) / 2, (sigmas[step + 1] + sigmas[step]) / 2
    return half * (derivative(middle - half / math.sqrt(3.0)) + derivative(middle + half / math.sqrt(3.0)))


def _beta_sigmas(scheduler: Any, in_sigmas: NDArray[np.float32], num_inference_steps: int) -> NDArray[np.float64]:
    """Return the sigmas of a schedule, as `_convert_to_beta` of Diffusers' schedulers does.

    Args:
        scheduler: A scheduler of Diffusers.
        in_sigmas: Its sigmas, descending. The first and last are the bounds unless the configuration has others.
        num_inference_steps: Number of sigmas to return.
    """
    low, high = scheduler.config.get("sigma_min"), scheduler.config.get("sigma_max")
    low = float(in_sigmas[-1]) if low is None else low
    high = float(in_sigmas[0]) if high is None else high
    return np.array([low + quantile * (high - low) for quantile in _quantiles(num_inference_steps)])


@functools.lru_cache(256)
def _quantiles(count: int) -> tuple[float, ...]:
    return tuple(_quantile(float(1.0 - place)) for place in np.linspace(0, 1, count))


def _quantile(share: float) -> float:
    """Return the number below which this share of the distribution lies."""
    if share in (0.0, 1.0):
        return share
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _share_below(middle) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _share_below(number: float) -> float:
    """Return the share of the distribution below a number between 0 and 1: the regularized incomplete beta function."""
    if number > 0.5:  # The distribution is symmetric, and the fraction converges faster below its middle.
        return 1.0 - _share_below(1.0 - number)
    front = math.exp(_SHAPE * (math.log(number) + math.log1p(-number)) - _LOG_NORM)
    return front * _fraction(number) / _SHAPE


def _fraction(number: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method.

    Source: NIST Digital Library of Mathematical Functions, 8.17.22.
    """
    above, below = 1.0, 1.0 / (1.0 - 2 * _SHAPE * number / (_SHAPE + 1))
    result = below
    for term in range(1, _MAX_TERMS):
        even = term * (_SHAPE - term) * number / ((_SHAPE + 2 * term - 1) * (_SHAPE + 2 * term))
        odd = -(_SHAPE + term) * (2 * _SHAPE + term) * number / ((_SHAPE + 2 * term) * (_SHAPE + 2 * term + 1))
        for coefficient in (even, odd):
            below = 1.0 / ((1.0 + coefficient * below) or _TINY)
            above = (1.0 + coefficient / above) or _TINY
            result *= above * below
        if abs(above * below - 1.0) < _PRECISION:
            break
    return result
