"""Rules of schedules that gateway and worker know before there is a model."""

from __future__ import annotations

from typing import Any

import pytest

from bottega.errors import Violation
from bottega.rules import LAST_SIGMAS, MAX_STEPS, SPACINGS
from bottega.schedules import Schedule, check_sampler_schedule, check_schedule, schedule_of, steps_of
from bottega.v1.generation_pb2 import FinalSigmasType, GenerationSpec, Sampler, TimestepSpacing

TRAILING = TimestepSpacing.TIMESTEP_SPACING_TRAILING
ZERO = FinalSigmasType.FINAL_SIGMAS_TYPE_ZERO


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [  # bounds of single fields are in the fuzz corpus
        (
            {"use_karras_sigmas": True, "use_beta_sigmas": True},
            "use_beta_sigmas",
            "must be absent or false with use_karras_sigmas: a schedule has one of them",
        ),
        (
            {"timesteps": [5], "sigmas": [1.0, 0.0]},
            "sigmas",
            "must be empty with timesteps: a schedule has one of the two",
        ),
        (
            {"timesteps": [5], "timestep_spacing": TRAILING},
            "timestep_spacing",
            "must be absent with timesteps, which take its place",
        ),
        (
            {"sigmas": [1, 0], "timestep_spacing": TRAILING},
            "timestep_spacing",
            "must be absent with sigmas, which take its place",
        ),
        (
            {"sigmas": [1, 0], "final_sigmas_type": ZERO},
            "final_sigmas_type",
            "must be absent with sigmas, whose last one takes its place",
        ),
        (
            {"sigmas": [1, 0], "use_karras_sigmas": True},
            "use_karras_sigmas",
            "must be absent or false with sigmas, which take its place",
        ),
        (
            {"timesteps": [9, 5], "num_inference_steps": 3},
            "num_inference_steps",
            "must be 2, the steps of timesteps, or absent",
        ),
        (
            {"sigmas": [9, 5, 0], "num_inference_steps": 3},
            "num_inference_steps",
            "must be 2, the steps of sigmas, or absent",
        ),
    ],
)
def test_a_broken_schedule_is_refused_by_its_field(fields: dict[str, Any], field: str, rule: str) -> None:
    (violation,) = check_schedule(GenerationSpec(**fields))
    assert violation == Violation(field=f"spec.{field}", description=rule)


def test_a_schedule_on_this_side_of_every_bound_is_none_of_them() -> None:
    schedules: list[dict[str, Any]] = [
        {"use_karras_sigmas": False, "use_beta_sigmas": True, "timestep_spacing": TRAILING},
        {"timesteps": range(MAX_STEPS - 1, -1, -1), "num_inference_steps": MAX_STEPS, "final_sigmas_type": ZERO},
        {"sigmas": range(MAX_STEPS, -1, -1)},
        {"sigmas": [10_000.0, 0.5], "use_karras_sigmas": False},
    ]
    for fields in schedules:
        assert list(check_schedule(GenerationSpec(**fields))) == [], fields


def test_a_million_timesteps_are_refused_without_being_looked_at_each() -> None:
    spec = GenerationSpec(timesteps=[7] * 1_000_000)
    (violation,) = check_schedule(spec)
    assert violation.description == "must have at most 200 numbers"
    assert len(schedule_of(spec).timesteps) == MAX_STEPS + 1


def test_a_list_sets_the_number_of_steps() -> None:
    assert steps_of(GenerationSpec(timesteps=[9, 5, 1]), 20) == 3
    assert steps_of(GenerationSpec(sigmas=[9, 5, 1]), 20) == 2
    assert steps_of(GenerationSpec(num_inference_steps=4), 20) == 4
    assert steps_of(GenerationSpec(), 20) == 20


def test_every_value_of_the_contract_has_a_name_and_unknown_ones_are_absent() -> None:
    assert {0, *SPACINGS.values()} == set(TimestepSpacing.values())
    assert {0, *LAST_SIGMAS.values()} == set(FinalSigmasType.values())
    unknown = GenerationSpec(timestep_spacing=99, final_sigmas_type=99)  # type: ignore[arg-type]
    assert schedule_of(unknown) == Schedule()


def test_a_schedule_that_the_sampler_has_not_is_refused_without_a_model() -> None:
    spec = GenerationSpec(timestep_spacing=TRAILING)
    (violation,) = check_sampler_schedule(spec, Sampler.SAMPLER_DPMPP_2S, False)
    rule = "must be absent with the sampler dpmpp_2s: its DPMSolverSinglestepScheduler ignores it"
    assert violation == Violation(field="spec.timestep_spacing", description=rule)
    assert not list(check_sampler_schedule(spec, Sampler.SAMPLER_DPMPP_2M, False))
    (violation,) = check_sampler_schedule(spec, Sampler.SAMPLER_DPMPP_2M, True)
    assert violation.description.startswith("must be absent where use_karras_sigmas is true")
    listed = GenerationSpec(timesteps=[9, 5], image=b"x")
    (violation,) = check_sampler_schedule(listed, Sampler.SAMPLER_HEUN, False)
    rule = "must be empty with image: the sampler heun would count each of their steps twice, and skip others"
    assert violation == Violation(field="spec.timesteps", description=rule)
    assert not list(check_sampler_schedule(listed, Sampler.SAMPLER_EULER, False))
    assert not list(check_sampler_schedule(spec, 99, False))  # type: ignore[arg-type]


def test_the_bound_of_timesteps_is_unknown_without_a_model() -> None:
    spec = GenerationSpec(timesteps=[1500, 500])
    assert not list(check_sampler_schedule(spec, Sampler.SAMPLER_EULER, False))
    (violation,) = schedule_of(spec).problems("euler", {"_class_name": "EulerDiscreteScheduler"})
    assert violation.description == "must be below 1000, the timesteps that the model was trained with"
