"""Presets: a model's own defaults, in the file `bottega.json` beside its `model_index.json`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from bottega import config
from bottega.errors import ConfigError
from bottega.model_files.family_names import Z_IMAGE
from bottega.model_files.json_files import read_json_object
from bottega.model_files.scheduler_rules import FLOW_MATCHING, one_conversion
from bottega.rules import MAX_GUIDANCE_SCALE, MAX_STEPS, FinalSigmasTypeName, SamplerName, TimestepSpacingName
from bottega.strict import STRICT

PRESET_FILE = "bottega.json"

_OF_SCHEDULER = (
    "timestep_spacing",
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "final_sigmas_type",
    "rescale_betas_zero_snr",
)
_TRAILING: Literal["trailing"] = "trailing"
"""Spacing that ends a schedule at the last training timestep, as published few-step models have it."""
_TURBO_CLASS, _LIGHTNING_CLASS = "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler"
# The number of steps in the name of a Lightning checkpoint, such as sdxl_lightning_4step.
_NAMED_STEPS = re.compile(r"(?<![0-9])([1248])[ _-]?steps?(?![a-z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Defaults of one model, as its folder states them. A field that is None keeps the suite's default."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT

    num_inference_steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] | None = None
    """Denoising steps of a request that names none."""
    guidance_scale: Annotated[float, Field(ge=0, le=MAX_GUIDANCE_SCALE)] | None = None
    """Classifier-free guidance of a request that names none. At most 1 switches guidance off."""
    sampler: SamplerName | None = None
    """Sampler of a request that names none, instead of the model's `scheduler_config.json`."""
    timestep_spacing: TimestepSpacingName | None = None
    """Spacing of the timesteps, instead of the model's `scheduler_config.json`.

    This field and the next five change what the model draws, so they are part of the model's hash. A request may choose
    another schedule, but not `rescale_betas_zero_snr`, which says how the model was trained.
    """
    use_karras_sigmas: bool | None = None
    """Whether to use Karras' sigmas, instead of the model's `scheduler_config.json`. True replaces other sigmas."""
    use_exponential_sigmas: bool | None = None
    """Whether to use exponential sigmas, likewise."""
    use_beta_sigmas: bool | None = None
    """Whether to use beta sigmas, likewise."""
    final_sigmas_type: FinalSigmasTypeName | None = None
    """Noise level after the last step, instead of the model's `scheduler_config.json`."""
    rescale_betas_zero_snr: bool | None = None
    """Whether the model was trained with zero terminal SNR, instead of the model's `scheduler_config.json`."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """Element type in which the model computes if a worker's `engine.dtype` is auto, whatever that of its files."""

    @property
    def scheduler_overrides(self) -> dict[str, object]:
        """Values that replace those of the model's `scheduler_config.json`."""
        values = {name: getattr(self, name) for name in _OF_SCHEDULER}
        return one_conversion({name: value for name, value in values.items() if value is not None})


def read_preset(folder: Path) -> Preset | None:
    """Return the preset in a model's folder, or None if it has no `bottega.json`.

    Raises:
        ValueError: A sentence with all wrong keys and values, without the file's name.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A preset for a model that looks like a few-step model."""

    preset: Preset
    uncertain: str = ""
    """Text on what neither the scheduler's configuration nor the name settles; empty if they settle everything."""


def propose_preset(name: str, scheduler_config: Mapping[str, Any], family: str = "") -> Proposal | None:
    """Return a proposal for a model that looks like a few-step model, or None.

    Its scheduler's configuration says more than its name: fine-tunes are called "turbo" and "lightning", too.

    Args:
        name: The model's name or its repository's.
        scheduler_config: The model's `scheduler_config.json`.
        family: Its family; see `TITLES`.

    Source: the model cards of stabilityai/sdxl-turbo (1 to 4 steps), ByteDance/SDXL-Lightning (checkpoints for 1, 2, 4
    and 8 steps), Lykon/dreamshaper-xl-v2-turbo (4 to 8 steps, guidance 2) and
    stabilityai/stable-diffusion-3.5-large-turbo (4 steps, guidance 0), and ZImagePipeline of Diffusers (8 steps).
    """
    words, class_name = name.lower(), scheduler_config.get("_class_name")
    if class_name == FLOW_MATCHING:
        turbo = Proposal(preset=Preset(num_inference_steps=8 if family == Z_IMAGE else 4, guidance_scale=0.0))
        return turbo if "turbo" in words else None
    trailing = scheduler_config.get("timestep_spacing") == _TRAILING
    # Models with these settings were retrained and need many steps, although they too have trailing timesteps.
    v_prediction = scheduler_config.get("prediction_type") == "v_prediction"
    few_steps = trailing and not (v_prediction or scheduler_config.get("rescale_betas_zero_snr"))
    if "lightning" in words or (few_steps and class_name == _LIGHTNING_CLASS and "turbo" not in words):
        return _propose_lightning(words, trailing=trailing)
    if few_steps and class_name == _TURBO_CLASS:
        if words == "sdxl-turbo":
            return Proposal(preset=Preset(num_inference_steps=1, guidance_scale=0.0))
        why = "SDXL-Turbo draws with 1 to 4 steps and without guidance, its fine-tunes with 4 to 8 and guidance up to 2"
        return Proposal(preset=Preset(num_inference_steps=4, guidance_scale=0.0), uncertain=why)
    if "turbo" in words:
        why = (
            "its name says turbo and its scheduler is not SDXL-Turbo's; most such models take 4 to 8 steps, guidance 2"
        )
        return Proposal(preset=Preset(num_inference_steps=6, guidance_scale=2.0), uncertain=why)
    return None


def _propose_lightning(words: str, *, trailing: bool) -> Proposal:
    found = _NAMED_STEPS.search(words)
    preset = Preset(
        num_inference_steps=int(found[1]) if found else 4,
        guidance_scale=0.0,
        timestep_spacing=None if trailing else _TRAILING,
    )
    if found and "lightning" in words:
        return Proposal(preset=preset)
    why = "checkpoints of SDXL-Lightning are for 2, 4 or 8 steps each, and fine-tunes of it may want guidance up to 2"
    return Proposal(preset=preset, uncertain=why)


def preset_text(preset: Preset) -> str:
    """Return the content of a `bottega.json` with this preset."""
    return json.dumps({key: value for key, value in asdict(preset).items() if value is not None})
