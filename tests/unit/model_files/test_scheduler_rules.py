"""A model whose scheduler is not served, or whose configuration cannot draw, is refused in one sentence."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bottega.model_files.configuration_rules import check_configurations
from bottega.model_files.folder_check import check_model_folder
from bottega.model_files.presets import Preset
from bottega.model_files.scheduler_rules import SCHEDULER_RULES, UNSERVED_CLASSES
from tests.samples import published_configs as published
from tests.samples.model_folders import with_scheduler

*_OTHERS, _LAST = SCHEDULER_RULES
SERVED = f"_class_name must be {', '.join(_OTHERS)} or {_LAST}, not "


def problems(class_name: str, preset: Preset | None = None, **config: Any) -> list[str]:
    """What is refused of a published scheduler with another class and other keys."""
    scheduler = published.scheduler() | {"_class_name": class_name} | config
    return check_configurations(published.model_index(), {"scheduler": scheduler}, preset)


@pytest.mark.parametrize("name", UNSERVED_CLASSES)
def test_a_class_that_is_not_served_is_named_with_those_that_are(name: str) -> None:
    (problem,) = problems(name)
    assert problem.startswith(f'scheduler/scheduler_config.json: {SERVED}"{name}"')
    assert problem.endswith(f": {UNSERVED_CLASSES[name]}")


def test_the_class_is_the_one_that_the_index_names(tmp_path: Path) -> None:
    """Diffusers goes by it, whatever the scheduler's own configuration says."""
    served = with_scheduler(tmp_path / "served", "EulerDiscreteScheduler", _class_name="DPMSolverSDEScheduler")
    assert check_model_folder(served).problems == ()
    (problem,) = check_model_folder(
        with_scheduler(tmp_path / "other", "DPMSolverSDEScheduler", _class_name="EulerDiscreteScheduler")
    ).problems
    assert problem.startswith(f'scheduler/scheduler_config.json: {SERVED}"DPMSolverSDEScheduler"')


def test_a_preset_may_name_a_sampler_in_place_of_a_class_that_solves_the_same_equation() -> None:
    assert problems("PNDMScheduler", Preset(sampler="euler")) == []
    assert len(problems("FlowMatchEulerDiscreteScheduler", Preset(sampler="euler"))) == 1
    (problem,) = problems("DEISMultistepScheduler", Preset(sampler="dpmpp_2m"), algorithm_type="deis")
    assert 'final_sigmas_type must be "sigma_min" with algorithm_type "deis"' in problem


def test_a_folder_with_an_infinite_number_in_its_scheduler_is_read(tmp_path: Path) -> None:
    folder = with_scheduler(tmp_path / "model", "DPMSolverMultistepScheduler", lambda_min_clipped=-math.inf)
    assert "-Infinity" in (folder / "scheduler" / "scheduler_config.json").read_text()
    assert check_model_folder(folder).problems == ()


@pytest.mark.parametrize(
    "value", [{"use_karras_sigmas": "yes"}, {"beta_start": "0.1"}, {"steps_offset": 1.5}, {"trained_betas": [None]}]
)
def test_values_of_another_type_are_refused(value: dict[str, Any]) -> None:
    assert len(problems("EulerDiscreteScheduler", **value)) == 1
