"""The samplers that work with a model's scheduler configuration, and the reasons why others are refused."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bottega.device.device import run_pieces
from bottega.errors import Violation
from bottega.model.samplers import Sampler
from bottega.model.schedulers import KARRAS, FlowSchedule, SamplerKind, Sigmas, draws_noise, make_scheduler, pace_of
from bottega.model_files.scheduler_check import sampler_problems
from bottega.model_files.scheduler_rules import CONVERTED_SIGMAS
from bottega.plain_text import excerpt
from bottega.planning import Pace
from bottega.rules import MAX_STEPS
from bottega.schedules import AS_CONFIGURED, Schedule

# Steps treat all elements of a latent alike, except for thresholds that are computed from the whole latent.
_TRIED_SHAPE = (1, 4, 4, 4)
_REASON_CHARACTERS = 200
# Schedules of requests whose refusals are remembered; each has up to 200 numbers.
_MAX_REMEMBERED = 256

_SLOW_TO_COUNT = frozenset({SamplerKind.KDPM2, SamplerKind.KDPM2_ANCESTRAL})
# Three of Runge-Kutta's, and one beside them.
_LEAST_RUNGE_KUTTA_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerChoice:
    """A sampler with a schedule, with or without Karras' sigmas."""

    kind: SamplerKind
    karras: bool = False
    schedule: Schedule = AS_CONFIGURED

    @property
    def overrides(self) -> Mapping[str, Any]:
        """Values that replace those of the model's scheduler configuration."""
        return self.schedule.overrides(self.kind.value, self.karras)

    def __str__(self) -> str:
        """Return the name of the choice for messages, such as `dpmpp_2m with Karras' sigmas`."""
        return self.kind.name.lower() + (" with Karras' sigmas" if self.karras else "")


CHOICES = tuple(
    SamplerChoice(kind=kind, karras=karras)
    for kind in SamplerKind
    for karras in ((False, True) if kind in KARRAS else (False,))
)
"""All choices whose schedule is as the model is configured, but for Karras' sigmas."""


class ModelSamplers:
    """The samplers of one model.

    A choice is tried before it is used: a few numbers go through all steps of a schedule. It is refused if Diffusers
    cannot make it, or if its values are not finite. Models of one configuration share the results in a process.

    Args:
        config: The model's scheduler configuration, without the defaults of its scheduler's class.
        steps: Number of denoising steps that `refusals` applies to.
        sigmas: See `FlowSchedule.sigmas`.
    """

    def __init__(self, config: Mapping[str, Any], *, steps: int, sigmas: Sigmas | None = None) -> None:
        self.config = dict(config)
        self._steps = steps
        self._sigmas = sigmas
        self._refusals = _known_refusals(json.dumps(self.config, sort_keys=True, default=str), sigmas)
        self._refusals_of_schedules: dict[tuple[SamplerChoice, int], str] = {}

    @property
    def refusals(self) -> Mapping[SamplerChoice, str]:
        """Reason why each choice is refused; empty for choices that work. The first call takes about 300 ms."""
        return {choice: self.refusal(choice, self._steps) for choice in CHOICES}

    def default_choice(self, kind: SamplerKind) -> SamplerChoice:
        """Return the choice of a request that names a sampler and does not mention Karras' sigmas."""
        return SamplerChoice(kind=kind, karras=kind in KARRAS and bool(self.config.get("use_karras_sigmas")))

    def first_step_from(self, kind: SamplerKind, steps: int) -> int:
        """Return the first step of a picture that begins with another picture's latent after `steps` steps.

        A sampler that draws no noise would repeat the other picture's composition. Such a picture gets the noise of one
        step back and repeats that step.
        """
        return steps if draws_noise(kind, self.config) else steps - 1

    def pace(self, kind: SamplerKind) -> Pace:
        """Return how many evaluations of the network a sampler makes."""
        return pace_of(kind, self.config)

    def open(
        self, choice: SamplerChoice, *, steps: int, begin: int = 0, tokens: int = 0, restarts: bool = False
    ) -> Sampler:
        """Return a sampler for one request of a picture with so many tokens; see `Sampler`."""
        return Sampler(
            choice.kind,
            self.config,
            steps=steps,
            begin=begin,
            karras=choice.karras,
            schedule=choice.schedule,
            flow=FlowSchedule(tokens=tokens, sigmas=self._sigmas),
            restarts=restarts,
        )

    def schedule_problems(self, choice: SamplerChoice, *, from_image: bool = False) -> Iterator[Violation]:
        """Yield each field of a request's schedule that Diffusers rejects or ignores with its sampler."""
        yield from choice.schedule.problems(
            choice.kind.value, {**self.config, **choice.overrides}, from_image=from_image
        )

    def refusal(self, choice: SamplerChoice, steps: int) -> str:
        """Return the reason why a choice cannot make `steps` steps; empty if it can."""
        return run_pieces(self.refusal_in_pieces(choice, steps))

    def refusal_in_pieces(self, choice: SamplerChoice, steps: int) -> Generator[None, None, str]:
        """Return the same as `refusal`, and yield after each evaluation that is tried.

        200 steps take up to 300 ms, and each new list of timesteps or sigmas is tried.
        """
        known, key = self._known(choice), (choice, steps)
        if key not in known:
            reason = yield from self._try(choice, steps)
            if choice.schedule != AS_CONFIGURED and len(known) >= _MAX_REMEMBERED:
                known.pop(next(iter(known)))
            known[key] = reason
        else:
            known[key] = known.pop(key)  # the last that is forgotten
        return known[key]

    def refusal_before_trial(self, choice: SamplerChoice, steps: int) -> str:
        """Return the reason why a choice cannot make `steps` steps; empty if none is found without a trial."""
        reason = self._known(choice).get((choice, steps))
        if reason is None:
            opened = self._open_for_trial(choice, steps)
            reason = opened if isinstance(opened, str) else ""
        return reason

    def refused_steps(self, choice: SamplerChoice) -> Mapping[int, str]:
        """Return which numbers of steps, up to MAX_STEPS, a choice cannot make, each with its reason.

        This checks only timesteps, in about 10 ms for a choice; `refusal` also tries one number of steps. It does not
        check converted sigmas, such as Karras': there are as many as steps, and they would take a second.
        """
        if choice.kind is SamplerKind.FLOW_MATCH_EULER:
            return {1: "the model's shift_terminal needs at least 2 steps"} if self.config.get("shift_terminal") else {}
        # KDPM2 has as many timesteps as Heun, and computes those between two steps slowly.
        counted = SamplerKind.HEUN if choice.kind in _SLOW_TO_COUNT else choice.kind
        scheduler, pace = make_scheduler(counted, self.config, choice.overrides), self.pace(choice.kind)
        if any(scheduler.config.get(name) for name in CONVERTED_SIGMAS):
            return {}
        refused: dict[int, str] = {}
        for steps in range(1, MAX_STEPS + 1):
            try:
                scheduler.set_timesteps(steps)
            except Exception as error:  # noqa: BLE001 - as in a trial
                refused[steps] = _impossible(choice, steps, error)
            else:
                if reason := _miscounted(len(scheduler.timesteps), steps, pace):
                    refused[steps] = reason
        return refused

    def _known(self, choice: SamplerChoice) -> dict[tuple[SamplerChoice, int], str]:
        """Return the known refusals among which those of a choice are."""
        return self._refusals if choice.schedule == AS_CONFIGURED else self._refusals_of_schedules

    def _try(self, choice: SamplerChoice, steps: int) -> Generator[None, None, str]:
        sampler = self._open_for_trial(choice, steps)
        if isinstance(sampler, str):
            return sampler
        try:
            finite = yield from _stays_finite(sampler)
        except Exception as error:  # noqa: BLE001 - the boundary of a trial: it may be anything that Diffusers raises
            return _impossible(choice, steps, error)
        return (
            "" if finite else f"{steps} steps with the model's scheduler configuration give values that are not finite"
        )

    def _open_for_trial(self, choice: SamplerChoice, steps: int) -> Sampler | str:
        """Return a sampler, or the reason why there is none."""
        problems = [f"{problem.field}: {problem.description}" for problem in self.schedule_problems(choice)]
        problems += sampler_problems(choice.kind.value, {**self.config, **choice.overrides})
        if problems:
            return problems[0]
        try:
            sampler = self.open(choice, steps=steps)
            return _miscounted(sampler.evaluations, steps, self.pace(choice.kind)) or sampler
        except Exception as error:  # noqa: BLE001 - as in a trial
            return _impossible(choice, steps, error)


@functools.lru_cache(maxsize=64)
def _known_refusals(config: str, sigmas: Sigmas | None) -> dict[tuple[SamplerChoice, int], str]:
    """Return the refusals, which `ModelSamplers` adds to, of all models with a configuration, given as JSON."""
    return {}


def _miscounted(evaluations: int, steps: int, pace: Pace) -> str:
    """Return why a schedule of `evaluations` is refused if `steps` are requested; empty if they fit each other."""
    if evaluations == (pace.evaluations(steps) if steps > 1 else 1):
        return ""
    made = (evaluations - pace.extra) // pace.per_step
    return f"the model's timestep spacing makes {made} steps of {steps}: ask for another number"


def _impossible(choice: SamplerChoice, steps: int, error: Exception) -> str:
    if choice.kind is SamplerKind.PNDM and steps < _LEAST_RUNGE_KUTTA_STEPS:
        return (
            f"PNDM needs at least {_LEAST_RUNGE_KUTTA_STEPS} steps, because skip_prk_steps of the model's scheduler "
            "configuration is not true"
        )
    if "original_steps" in str(error):  # LCM and TCD name each combination at length
        scaled = choice.schedule.strength is not None
        most = "strength x original_inference_steps" if scaled else "original_inference_steps"
        cure = "raise strength or ask for fewer steps" if scaled else "ask for fewer steps"
        return f"{steps} steps are too many: {choice.kind.value.upper()} makes at most {most}; {cure}"
    return f"Diffusers cannot make {steps} steps: {excerpt(str(error), _REASON_CHARACTERS)}"


@torch.inference_mode()
def _stays_finite(sampler: Sampler) -> Generator[None, None, bool]:
    """Return whether all evaluations of a sampler map finite values to finite values, and yield after each.

    Raises what Diffusers raises.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    latent = torch.randn(_TRIED_SHAPE, generator=generator) * sampler.init_noise_sigma
    for evaluation in range(sampler.evaluations):
        # A prediction of the magnitude of the input, as noise, velocity and pictures have.
        predicted = torch.tanh(sampler.model_input(latent, evaluation))
        latent, estimate = sampler.step(predicted, evaluation, latent, generator)
        if not math.isfinite(float(latent.sum() + estimate.sum())):
            return False
        yield
    return True
