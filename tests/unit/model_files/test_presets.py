"""Presets of models: how `bottega.json` is read, and which one is proposed where it is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bottega.model_files.presets import PRESET_FILE, Preset, preset_text, propose_preset, read_preset

EULER = "EulerDiscreteScheduler"
ANCESTRAL = "EulerAncestralDiscreteScheduler"


def test_a_folder_without_a_preset_has_none(tmp_path: Path) -> None:
    assert read_preset(tmp_path) is None


def test_a_preset_is_read_from_the_folder(tmp_path: Path) -> None:
    values = {"num_inference_steps": 4, "guidance_scale": 0.0, "sampler": "euler", "timestep_spacing": "trailing"}
    (tmp_path / PRESET_FILE).write_text(json.dumps(values))
    expected = Preset(num_inference_steps=4, guidance_scale=0.0, sampler="euler", timestep_spacing="trailing")
    assert read_preset(tmp_path) == expected


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is no JSON"),
        ("[" * 10_000, "is no JSON"),
        ("[]", "no object"),
        ('{"steps": 4}', "steps"),
        ('{"num_inference_steps": 0}', "num_inference_steps"),
        ('{"num_inference_steps": 100000}', "num_inference_steps"),
        ('{"guidance_scale": NaN}', "is no JSON"),
        ('{"sampler": "lcm"}', "sampler"),
        ('{"timestep_spacing": "even"}', "timestep_spacing"),
    ],
)
def test_a_preset_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / PRESET_FILE).write_text(content)
    with pytest.raises(ValueError, match=why) as refused:
        read_preset(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "scheduler", "proposed"),
    [
        ("stable-diffusion-xl-base-1.0", {"_class_name": EULER, "timestep_spacing": "leading"}, None),
        ("a-model", {"_class_name": EULER}, None),
        (
            "sdxl-turbo",
            {"_class_name": ANCESTRAL, "timestep_spacing": "trailing"},
            Preset(num_inference_steps=1, guidance_scale=0.0),
        ),
        (
            "a-model",
            {"_class_name": EULER, "timestep_spacing": "trailing"},
            Preset(num_inference_steps=4, guidance_scale=0.0),
        ),
        (
            "Proteus-Lightning",
            {"_class_name": EULER, "timestep_spacing": "leading"},
            Preset(num_inference_steps=4, guidance_scale=0.0, timestep_spacing="trailing"),
        ),
    ],
    ids=["base", "no spacing", "turbo", "trailing alone", "lightning published with leading steps"],
)
def test_a_few_step_model_without_a_preset_is_proposed_one(
    name: str, scheduler: dict[str, str], proposed: Preset | None
) -> None:
    assert propose_preset(name, scheduler) == proposed


def test_the_text_of_a_proposal_is_a_preset_that_can_be_read(tmp_path: Path) -> None:
    proposed = Preset(num_inference_steps=4, guidance_scale=0.0, timestep_spacing="trailing")
    (tmp_path / PRESET_FILE).write_text(preset_text(proposed))
    assert read_preset(tmp_path) == proposed
