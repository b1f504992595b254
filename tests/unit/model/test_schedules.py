"""Schedules of requests: each sampler makes them as stock Diffusers does, or refuses the field by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.utils import logging as diffusers_logging

from bottega.model.loading import _scheduler_config
from bottega.model.sampler_choices import ModelSamplers, SamplerChoice
from bottega.model.schedulers import KARRAS, SamplerKind
from bottega.model_files.presets import Preset
from bottega.rules import MAX_STEPS
from bottega.schedules import CUSTOM_LISTS, Schedule
from tests.support.schedulers import PLAIN, SEED, SHAPE, our_latent, stock_latent, stock_scheduler
from tests.support.stock import deviation

CONFIG: Mapping[str, Any] = {
    "_class_name": "EulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
STEPS = 7
TIMESTEPS = (999, 870, 610, 459, 239, 79, 12)
SIGMAS = (14.6, 6.5, 3.9, 1.9, 0.9, 0.4, 0.15, 0.0)
# Schedules, and the samplers that have no such one, or to which Diffusers does nothing by it.
PLAIN_KINDS = frozenset(PLAIN)
WITHOUT_SPACING = {SamplerKind.DPMPP_2S, SamplerKind.LCM, SamplerKind.TCD}
WITH_LAST = {
    SamplerKind.EULER,
    SamplerKind.DPMPP_2M,
    SamplerKind.DPMPP_2M_SDE,
    SamplerKind.DPMPP_2S,
    SamplerKind.UNIPC,
}
SCHEDULES: Mapping[str, tuple[Schedule, frozenset[SamplerKind]]] = {
    "exponential": (Schedule(use_exponential_sigmas=True), PLAIN_KINDS - KARRAS),
    "beta": (Schedule(use_beta_sigmas=True), PLAIN_KINDS - KARRAS),
    "trailing": (Schedule(timestep_spacing="trailing"), frozenset(WITHOUT_SPACING)),
    "linspace": (Schedule(timestep_spacing="linspace"), frozenset(WITHOUT_SPACING)),
    "sigma_min": (Schedule(final_sigmas_type="sigma_min"), frozenset(PLAIN_KINDS - WITH_LAST)),
    "timesteps": (
        Schedule(timesteps=TIMESTEPS),
        frozenset(kind for kind in PLAIN_KINDS if kind.value not in CUSTOM_LISTS["timesteps"]),
    ),
    "sigmas": (Schedule(sigmas=SIGMAS), PLAIN_KINDS - {SamplerKind.EULER}),
}


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Diffusers warns of timesteps that samplers of consistency models were not trained with."""
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    yield
    diffusers_logging.set_verbosity(level)


def custom(schedule: Schedule) -> dict[str, Any]:
    """The lists as stock's pipelines take them."""
    lists = {"timesteps": schedule.timesteps, "sigmas": schedule.sigmas}
    return {name: list(values) for name, values in lists.items() if values}


def samplers_of(**config: Any) -> ModelSamplers:
    model = stock_scheduler(getattr(diffusers, str(config.get("_class_name", CONFIG["_class_name"]))), config)
    return ModelSamplers(_scheduler_config(model, Preset()), steps=STEPS)


def assert_as_stock(samplers: ModelSamplers, choice: SamplerChoice, strength: float | None = None) -> None:
    # The configuration of the model and the request's fields, put together here and not by the code.
    asked = {name: value for name in FIELDS if (value := getattr(choice.schedule, name)) is not None}
    kinds = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
    if choice.karras:
        asked["use_karras_sigmas"] = True
    if any(asked.get(kind) for kind in kinds):
        asked = dict.fromkeys(kinds, False) | asked
    scheduler = stock_scheduler(choice.kind.scheduler_class, samplers.config, **choice.kind.overrides, **asked)
    theirs = stock_latent(scheduler, STEPS, strength=strength, **custom(choice.schedule))
    assert deviation(our_latent(samplers, choice, STEPS, strength=strength), theirs) <= 1e-4, choice


FIELDS = ("use_exponential_sigmas", "use_beta_sigmas", "timestep_spacing", "final_sigmas_type")


@pytest.mark.parametrize(
    ("name", "prediction"),
    [*((name, "v_prediction") for name in SCHEDULES), ("trailing", "sample"), ("timesteps", "epsilon")],
)
def test_every_sampler_makes_a_schedule_as_stock_does_or_refuses_the_field(name: str, prediction: str) -> None:
    schedule, without = SCHEDULES[name]
    samplers = samplers_of(**CONFIG, prediction_type=prediction)
    drawn = 0
    for kind in PLAIN_KINDS:
        choice = SamplerChoice(kind=kind, schedule=schedule)
        found = [problem.field for problem in samplers.schedule_problems(choice)]
        assert bool(found) == (kind in without), (kind, found)
        if kind in without:
            assert samplers.refusal(choice, STEPS).startswith(found[0])
        elif reason := samplers.refusal(choice, STEPS):
            assert reason == 'prediction_type must be "epsilon" or "v_prediction", not "sample"'
        else:
            assert_as_stock(samplers, choice, strength=0.6 if prediction == "v_prediction" else None)
            drawn += 1
    assert drawn


@pytest.mark.parametrize("default", ["use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"])
def test_a_chosen_kind_of_sigmas_replaces_the_models(default: str) -> None:
    samplers = samplers_of(**CONFIG, **{default: True})
    for kind in (SamplerKind.EULER, SamplerKind.DPMPP_2M):
        for schedule in (Schedule(use_exponential_sigmas=True), Schedule(use_beta_sigmas=True)):
            assert not samplers.refusal(SamplerChoice(kind=kind, schedule=schedule), STEPS)
            assert_as_stock(samplers, SamplerChoice(kind=kind, schedule=schedule))
        assert_as_stock(samplers, SamplerChoice(kind=kind, karras=True))
    plain = SamplerChoice(
        kind=SamplerKind.EULER, schedule=Schedule(use_exponential_sigmas=False, use_beta_sigmas=False)
    )
    assert torch.equal(
        our_latent(samplers, plain, STEPS),
        our_latent(samplers_of(**CONFIG), SamplerChoice(kind=SamplerKind.EULER), STEPS),
    )


def test_edm_samplers_take_the_last_sigma_alone() -> None:
    edm = samplers_of(_class_name="EDMEulerScheduler", sigma_min=0.002, sigma_max=80.0, sigma_data=0.5)
    for kind in (SamplerKind.EDM_EULER, SamplerKind.EDM_DPMPP_2M):
        assert_as_stock(edm, SamplerChoice(kind=kind, schedule=Schedule(final_sigmas_type="sigma_min")))
        for schedule, _ in SCHEDULES.values():
            found = [problem.field for problem in edm.schedule_problems(SamplerChoice(kind=kind, schedule=schedule))]
            assert bool(found) == (schedule.final_sigmas_type is None)


@pytest.mark.parametrize(
    ("kind", "config", "schedule", "sentence"),
    [
        (
            "dpmpp_2s",
            {},
            {"timestep_spacing": "trailing"},
            (
                "spec.timestep_spacing: must be absent with the sampler dpmpp_2s: "
                "its DPMSolverSinglestepScheduler ignores it"
            ),
        ),
        (
            "pndm",
            {},
            {"timesteps": (9, 3)},
            "spec.timesteps: must be empty with the sampler pndm: its PNDMScheduler takes none",
        ),
        (
            "heun",
            {"use_beta_sigmas": True},
            {"timesteps": (9, 3)},
            "spec.timesteps: must be empty where use_beta_sigmas is true: a schedule has one of the two",
        ),
        (
            "dpmpp_2m",
            {"use_exponential_sigmas": True},
            {"timestep_spacing": "trailing"},
            (
                "spec.timestep_spacing: must be absent where use_exponential_sigmas is true: "
                "the sampler dpmpp_2m ignores it then"
            ),
        ),
        (
            "euler",
            {},
            {"timesteps": (1000, 3)},
            "spec.timesteps: must be below 1000, the timesteps that the model was trained with",
        ),
        (
            "dpmpp_2m",
            {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
            {"final_sigmas_type": "zero"},
            'final_sigmas_type must be "sigma_min" with algorithm_type "dpmsolver", not "zero"',
        ),
    ],
)
def test_what_diffusers_rejects_or_ignores_is_refused_in_a_sentence(
    kind: str, config: dict[str, Any], schedule: dict[str, Any], sentence: str
) -> None:
    name = {"heun": "HeunDiscreteScheduler", "dpmpp_2m": "DPMSolverMultistepScheduler"}.get(kind, CONFIG["_class_name"])
    samplers = samplers_of(**{**CONFIG, "_class_name": name, **config})
    choice = SamplerChoice(kind=SamplerKind(kind), schedule=Schedule(**schedule))
    assert samplers.refusal(choice, 2) == sentence


def test_spacing_is_refused_where_stock_makes_the_same_schedule_with_another() -> None:
    """And nowhere else: this is what the code's list of such samplers says."""
    samplers = samplers_of(**CONFIG)
    for kind in PLAIN_KINDS & KARRAS - {SamplerKind.DPMPP_2S}:
        switches: tuple[dict[str, Any], ...] = ({"use_exponential_sigmas": True}, {"use_beta_sigmas": True})
        for switch in switches:
            made = []
            for spacing in ("trailing", "leading"):
                scheduler = stock_scheduler(kind.scheduler_class, CONFIG, **switch, timestep_spacing=spacing)
                scheduler.set_timesteps(STEPS)
                made.append(scheduler.timesteps)
            schedule = Schedule(**switch, timestep_spacing="trailing")
            refused = any(samplers.schedule_problems(SamplerChoice(kind=kind, schedule=schedule)))
            assert refused == torch.equal(*made), kind


def test_the_samplers_that_take_lists_are_those_whose_set_timesteps_has_the_argument() -> None:
    for name, samplers in CUSTOM_LISTS.items():
        takes = {kind.value for kind in SamplerKind if name in inspect.signature(_set_timesteps(kind)).parameters}
        # UniPC takes them for flow matching alone, EDM's Euler fails with them, and flow matching shifts them.
        others = {"flow_match_euler", *({"unipc", "edm_euler"} if name == "sigmas" else ())}
        assert samplers == takes - others


def _set_timesteps(kind: SamplerKind) -> Any:
    return kind.scheduler_class.set_timesteps


@pytest.mark.parametrize("kind", [SamplerKind.EULER, SamplerKind.HEUN, SamplerKind.DPMPP_2M, SamplerKind.DDPM])
def test_a_step_of_custom_timesteps_is_counted_as_any_other(kind: SamplerKind) -> None:
    samplers = samplers_of(**CONFIG)
    choice = SamplerChoice(kind=kind, schedule=Schedule(timesteps=TIMESTEPS))
    plain, scheduled = (samplers.open(each, steps=STEPS) for each in (SamplerChoice(kind=kind), choice))
    assert scheduled.evaluations == plain.evaluations
    assert [scheduled.evaluation_of(step) for step in range(8)] == [plain.evaluation_of(step) for step in range(8)]
    assert [int(scheduled.timestep(scheduled.evaluation_of(step))) for step in range(7)] == list(TIMESTEPS)


def test_noise_of_custom_timesteps_is_skipped_as_it_is_drawn() -> None:
    samplers = samplers_of(**CONFIG)
    for kind in (SamplerKind.DDPM, SamplerKind.LCM, SamplerKind.DPMPP_2M_SDE):
        choice = SamplerChoice(kind=kind, schedule=Schedule(timesteps=TIMESTEPS))
        drawn, skipped = (torch.Generator("cpu").manual_seed(SEED) for _ in range(2))
        our_latent(samplers, choice, STEPS, generator=drawn)
        torch.randn(SHAPE, generator=skipped)
        samplers.open(choice, steps=STEPS).skip_noise(STEPS, SHAPE, torch.float32, skipped)
        assert torch.equal(drawn.get_state(), skipped.get_state()), kind


def test_refusals_of_ever_new_schedules_are_not_all_remembered() -> None:
    samplers = samplers_of(**CONFIG)
    euler = SamplerChoice(kind=SamplerKind.EULER)
    for place in range(260):
        samplers.refusal(replace(euler, schedule=Schedule(timesteps=(900 - place,))), 1)
    assert len(samplers._refusals_of_schedules) <= 256
    longest = Schedule(timesteps=tuple(range(MAX_STEPS, 0, -1)))
    assert not samplers.refusal(replace(euler, schedule=longest), MAX_STEPS)
