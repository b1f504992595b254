"""Presets: what a request that does not say gets, by the file `bottega.json` beside a model's `model_index.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega import config
from bottega.errors import ConfigError
from bottega.model_files.json_files import read_json_object
from bottega.rules import MAX_GUIDANCE_SCALE, MAX_STEPS
from bottega.strict import STRICT

PRESET_FILE = "bottega.json"

# Words in a repository's or folder's name by which people tell few-step models, each with its usual steps.
# Source: the model cards of stabilityai/sdxl-turbo (1 to 4 steps) and ByteDance/SDXL-Lightning (2, 4 or 8 steps).
_STEPS_BY_WORD = {"turbo": 1, "lightning": 4}

# A schedule that ends its steps at the last training timestep is what few-step models are published with.
_FEW_STEP_SPACING = "trailing"
_FEW_STEPS = {"EulerAncestralDiscreteScheduler": 1, "EulerDiscreteScheduler": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults of one model, as its folder states them. A field that is None keeps the suite's default."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Denoising steps of a request that names none."""
    guidance_scale: Annotated[float, Field(ge=0, le=MAX_GUIDANCE_SCALE)] | None = None
    """Classifier-free guidance of a request that names none. At most 1 switches guidance off."""
    sampler: Literal["euler", "euler_ancestral", "ddim", "dpmpp_2m"] | None = None
    """Sampler of a request that names none, instead of the model's `scheduler_config.json`."""
    timestep_spacing: Literal["leading", "trailing", "linspace"] | None = None
    """Spacing of the timesteps for every request, instead of the model's `scheduler_config.json`.

    It changes what the model draws, so it is part of the model's hash.
    """
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Element type that the model computes in where a worker's `engine.dtype` is auto, whatever its files are in."""


def read_preset(folder: Path) -> Preset | None:
    """Return the preset in a model's folder, or None where it has no `bottega.json`.

    Raises:
        ValueError: With every key and value that is wrong, in one sentence without the file's name.
    """
    path = folder / PRESET_FILE
    if not path.exists():
        return None
    values = read_json_object(path)
    try:
        return config.parse(Preset, values, source=PRESET_FILE)
    except ConfigError as error:
        first, *rules = error.message.splitlines()
        raise ValueError("; ".join(rule.strip() for rule in rules) or first) from None


def propose_preset(name: str, scheduler_config: Mapping[str, Any]) -> Preset | None:
    """Return a preset for a model that looks like a few-step model, or None.

    Args:
        name: The model's name or its repository's; people write "turbo" and "lightning" there.
        scheduler_config: The model's `scheduler_config.json`. Few-step models are published with trailing timesteps.
    """
    spacing = scheduler_config.get("timestep_spacing")
    steps = next((count for word, count in _STEPS_BY_WORD.items() if word in name.lower()), None)
    if steps is None and spacing == _FEW_STEP_SPACING:
        steps = _FEW_STEPS.get(str(scheduler_config.get("_class_name")))
    if steps is None:
        return None
    fix_spacing: Literal["trailing"] | None = None if spacing == _FEW_STEP_SPACING else "trailing"
    return Preset(num_inference_steps=steps, guidance_scale=0.0, timestep_spacing=fix_spacing)


def preset_text(preset: Preset) -> str:
    """Return the content of a `bottega.json` with this preset."""
    return json.dumps({key: value for key, value in asdict(preset).items() if value is not None})
