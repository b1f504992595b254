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
        ('{"sampler": "dpm_sde"}', "sampler"),
        ('{"timestep_spacing": "even"}', "timestep_spacing"),
    ],
)
def test_a_preset_that_cannot_be_used_is_refused_by_name(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / PRESET_FILE).write_text(content)
    with pytest.raises(ValueError, match=why) as refused:
        read_preset(tmp_path)
    assert "\n" not in str(refused.value)


TURBO = {"_class_name": ANCESTRAL, "timestep_spacing": "trailing"}
LIGHTNING = {"_class_name": EULER, "timestep_spacing": "trailing"}
BASE = {"_class_name": EULER, "timestep_spacing": "leading"}
DPM = {"_class_name": "DPMSolverMultistepScheduler", "use_karras_sigmas": True}


@pytest.mark.parametrize(
    ("name", "scheduler", "steps", "guidance", "spacing", "uncertain"),
    [
        ("sdxl-turbo", TURBO, 1, 0.0, None, ""),
        ("SDXL-Turbo", TURBO, 1, 0.0, None, ""),
        ("my-turbo", TURBO, 4, 0.0, None, "its fine-tunes with 4 to 8"),
        ("a-model", TURBO, 4, 0.0, None, "its fine-tunes with 4 to 8"),
        ("dreamshaper-xl-v2-turbo", DPM, 6, 2.0, None, "its scheduler is not SDXL-Turbo's"),
        ("sdxl-turbo", BASE, 6, 2.0, None, "its scheduler is not SDXL-Turbo's"),
        ("a-turbo", LIGHTNING, 6, 2.0, None, "its scheduler is not SDXL-Turbo's"),
        ("sdxl_lightning_8step", LIGHTNING, 8, 0.0, None, ""),
        ("SDXL-Lightning-2steps", BASE, 2, 0.0, "trailing", ""),
        ("Proteus-Lightning", BASE, 4, 0.0, "trailing", "for 2, 4 or 8 steps each"),
        ("a-model", LIGHTNING, 4, 0.0, None, "for 2, 4 or 8 steps each"),
    ],
)
def test_a_few_step_model_is_proposed_a_preset_and_what_is_uncertain_of_it(
    name: str, scheduler: dict[str, object], steps: int, guidance: float, spacing: str | None, uncertain: str
) -> None:
    proposal = propose_preset(name, scheduler)
    assert proposal is not None
    found = proposal.preset
    assert (found.num_inference_steps, found.guidance_scale, found.timestep_spacing) == (steps, guidance, spacing)
    assert bool(proposal.uncertain) == bool(uncertain)
    assert uncertain in proposal.uncertain


@pytest.mark.parametrize(
    ("name", "scheduler"),
    [
        ("stable-diffusion-xl-base-1.0", BASE),
        ("a-model", {"_class_name": EULER}),
        ("a-model-of-8-steps", BASE),
        ("noobai-xl-v-pred", {**LIGHTNING, "prediction_type": "v_prediction", "rescale_betas_zero_snr": True}),
        ("zero-snr", {**TURBO, "rescale_betas_zero_snr": True}),
    ],
)
def test_a_model_of_many_steps_is_proposed_nothing(name: str, scheduler: dict[str, object]) -> None:
    assert propose_preset(name, scheduler) is None


def test_the_text_of_a_proposal_is_a_preset_that_can_be_read(tmp_path: Path) -> None:
    proposed = Preset(num_inference_steps=4, guidance_scale=0.0, timestep_spacing="trailing")
    (tmp_path / PRESET_FILE).write_text(preset_text(proposed))
    assert read_preset(tmp_path) == proposed
