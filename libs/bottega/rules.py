"""Rules of requests that the gateway and the worker both check: ranges and lengths in a spec.

Rules that depend on the model, an image or defaults are in the gateway (gateway/api), those of LoRAs and ControlNets in
`adapter_rules`. A `check_...` function yields a Violation for each broken rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from bottega.errors import InvalidRequest, Violation
from bottega.planning import steps_to_run
from bottega.prompt_syntax import MalformedPrompt, parse_weighted
from bottega.v1.generation_pb2 import (
    Fidelity,
    FinalSigmasType,
    GenerationSpec,
    ImageFormat,
    PromptSyntax,
    Sampler,
    TimestepSpacing,
)
from bottega.v1.hosted_pb2 import LeftOut

SamplerName = Literal[
    "euler",
    "euler_ancestral",
    "ddim",
    "dpmpp_2m",
    "dpmpp_2m_sde",
    "dpmpp_2s",
    "ddpm",
    "deis",
    "unipc",
    "lms",
    "lcm",
    "tcd",
    "edm_euler",
    "edm_dpmpp_2m",
    "pndm",
    "heun",
    "kdpm2",
    "kdpm2_ancestral",
    "flow_match_euler",
]
"""The samplers by the names that callers and models' presets use."""
TimestepSpacingName = Literal["leading", "trailing", "linspace"]
"""How steps are spread over the timesteps of training, by Diffusers' names."""
FinalSigmasTypeName = Literal["zero", "sigma_min"]
"""The noise level after the last step, by Diffusers' names."""

SPACINGS: Mapping[TimestepSpacingName, TimestepSpacing.ValueType] = MappingProxyType(
    {
        "leading": TimestepSpacing.TIMESTEP_SPACING_LEADING,
        "trailing": TimestepSpacing.TIMESTEP_SPACING_TRAILING,
        "linspace": TimestepSpacing.TIMESTEP_SPACING_LINSPACE,
    }
)
LAST_SIGMAS: Mapping[FinalSigmasTypeName, FinalSigmasType.ValueType] = MappingProxyType(
    {
        "zero": FinalSigmasType.FINAL_SIGMAS_TYPE_ZERO,
        "sigma_min": FinalSigmasType.FINAL_SIGMAS_TYPE_SIGMA_MIN,
    }
)

MAX_ADAPTERS = 8
MAX_IMAGES = 8
MAX_STEPS = 200
# Of a LoRA's trigger word or an embedding's token.
MAX_TRIGGER_CHARACTERS = 200
# More than the layers of any text encoder.
MAX_CLIP_SKIP = 100
# As in Diffusers' pipelines.
MAX_SEQUENCE_LENGTH = 512
# Files below a ControlNet's folder; a repository of a hub has some tens.
MAX_CONTROLNET_FILES = 10_000
MAX_SIDE = 1 << 14
# A day: no engine takes so long to start.
MAX_START_S = 86_400.0
MAX_GUIDANCE_SCALE = 50
# Seeds of all images stay exactly representable in a JSON number.
MAX_SEED = 2**53 - MAX_IMAGES
# Latents kept of one image: 50 steps of SD3 at 1024x1024 in float16, or 200 of SDXL.
MAX_KEPT_BYTES = 26 << 20
# State of a job between two steps, which fits into a message; that of a picture is below 1 MiB without step caches.
MAX_CHECKPOINT_BYTES = 16 << 20
# Jobs or adapters in one answer.
MAX_PAGE = 100

MAX_LEFT_OUT = 64
"""Maximum number of items that a service reports as not hosted."""
MAX_REASON_CHARACTERS = 512
"""Maximum length, in characters, of a reason that a service reports to the fleet."""

MAX_PROMPT_BYTES = 16 << 10
MAX_MARKS = 8192
"""Maximum number of characters in the weighted texts of a request that may be marks of the syntax. The gateway's event
loop reads the texts, which takes up to 0.01 s for so many: twelve texts full of them would take 0.1 s."""
_MARKS = "()[]:\\"
MAX_MODEL_CHARACTERS = 200

# The name of a LoRA or a ControlNet. It may have slashes, like names of hubs; it never becomes a path.
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]*(@[a-z0-9-]{1,63})?")
MAX_ADAPTER_CHARACTERS = 200
ADAPTER_NAMES = "up to 200 letters, digits and . _ / + -, a letter or digit first; @TENANT behind a tenant's own"
_DIGEST = re.compile("[0-9a-f]{64}")
_CACHE_ENTRY = re.compile("[0-9a-f]{32}@[1-9][0-9]{0,2}")
_RECORDING = re.compile("[0-9a-f]{32}")
_KARRAS_SAMPLERS = frozenset(
    Sampler.Value(f"SAMPLER_{name}")
    for name in (
        "EULER",
        "DPMPP_2M",
        "DPMPP_2M_SDE",
        "DPMPP_2S",
        "LMS",
        "DEIS",
        "UNIPC",
        "HEUN",
        "KDPM2",
        "KDPM2_ANCESTRAL",
        "FLOW_MATCH_EULER",
    )
)
_KARRAS_NAMES = ", ".join(Sampler.Name(sampler).removeprefix("SAMPLER_") for sampler in sorted(_KARRAS_SAMPLERS))
# Fields that only count with a mask.
_OF_MASKS = ("mask_alpha", "padding_mask_crop", "keep_unmasked", "mask_feather")
_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
RANGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "num_inference_steps": (1, MAX_STEPS),
        "guidance_scale": (0, MAX_GUIDANCE_SCALE),
        "guidance_rescale": (0, 1),
        "true_cfg_scale": (0, MAX_GUIDANCE_SCALE),
        "cfg_normalization": (0, MAX_GUIDANCE_SCALE),
        "cfg_truncation": (0, 1),
        "width": (1, MAX_SIDE),
        "height": (1, MAX_SIDE),
        "seed": (0, MAX_SEED),
        "num_images": (1, MAX_IMAGES),
        "quality": (1, 100),
        "padding_mask_crop": (0, 4096),
        "mask_feather": (0, 256),
        "clip_skip": (0, MAX_CLIP_SKIP),
        "max_sequence_length": (1, MAX_SEQUENCE_LENGTH),
    }
)
"""Lowest and highest value of each field of a spec that has both limits."""
# All known values of the enums. Asking the enum each time would take longer than the other rules.
_ENUMS: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "sampler": frozenset(Sampler.values()),
        "fidelity": frozenset(Fidelity.values()),
        "format": frozenset(ImageFormat.values()),
        "prompt_syntax": frozenset(PromptSyntax.values()),
        "timestep_spacing": frozenset(TimestepSpacing.values()),
        "final_sigmas_type": frozenset(FinalSigmasType.values()),
    }
)


def check_texts(spec: GenerationSpec) -> Iterator[Violation]:
    """Check that no text is too long, and that weighted ones can be read.

    A tokenizer would read all of a text, even though few tokens of a plain one count.
    """
    texts = {name: getattr(spec, name) for name in _TEXTS}
    texts |= {f"prompts[{index}]": prompt for index, prompt in enumerate(spec.prompts[:MAX_IMAGES])}
    weighted = spec.prompt_syntax == PromptSyntax.PROMPT_SYNTAX_WEIGHTED
    short = [text for text in texts.values() if len(text) <= MAX_PROMPT_BYTES] if weighted else []
    if (marks := sum(text.count(mark) for text in short for mark in _MARKS)) > MAX_MARKS:
        rule = f"all texts together have {marks} brackets, colons and backslashes: at most {MAX_MARKS} are read"
        yield Violation(field="spec.prompt_syntax", description=rule)
        weighted = False
    for name, text in texts.items():
        # Count the characters first, so that a text of some MiB is not encoded.
        size = len(text) if len(text) > MAX_PROMPT_BYTES else len(text.encode())
        if size > MAX_PROMPT_BYTES:
            yield Violation(field=f"spec.{name}", description=f"is over {MAX_PROMPT_BYTES} bytes of UTF-8")
        elif weighted:
            try:
                parse_weighted(text)
            except MalformedPrompt as error:
                yield Violation(field=f"spec.{name}", description=str(error))


def check_prompts(spec: GenerationSpec) -> Iterator[Violation]:
    """Check the list of prompts, and that no other field excludes several prompts."""
    if not spec.prompts:
        return
    if len(spec.prompts) > MAX_IMAGES:
        yield Violation(field="spec.prompts", description=f"must be at most {MAX_IMAGES}")
        return
    if spec.prompt not in ("", spec.prompts[0]):
        yield Violation(field="spec.prompt", description="must be absent with prompts, or equal to the first of them")
    if spec.HasField("num_images") and spec.num_images != len(spec.prompts):
        rule = f"must be absent with prompts, or their number, {len(spec.prompts)}, because each prompt is drawn once"
        yield Violation(field="spec.num_images", description=rule)
    if len(spec.prompts) == 1:
        return
    beside = {
        "controlnets": bool(spec.controlnets),
        "mask_image": spec.HasField("mask_image"),
        "keep_for_editing": spec.keep_for_editing,
    }
    for name in (name for name, used in beside.items() if used):
        rule = f"is not served with {name}: send one request for each prompt"
        yield Violation(field="spec.prompts", description=rule)
    for index, lora in enumerate(spec.loras):
        if lora.measure_similarity:
            rule = "must be false with several prompts: send one request for each"
            yield Violation(field=f"spec.loras[{index}].measure_similarity", description=rule)


def check_model_name(spec: GenerationSpec) -> Iterator[Violation]:
    """Check the length of the model's name, not whether it is served."""
    if len(spec.model) > MAX_MODEL_CHARACTERS:
        yield Violation(field="spec.model", description=f"must be at most {MAX_MODEL_CHARACTERS} characters")


def check_ranges(spec: GenerationSpec) -> Iterator[Violation]:
    """Check numbers and enum values, as far as they are set."""
    # Written so that NaN breaks the rules.
    for name, (low, high) in RANGES.items():
        if spec.HasField(name) and not low <= getattr(spec, name) <= high:  # type: ignore[arg-type]
            yield Violation(field=f"spec.{name}", description=f"must be {low} to {high}")
    if spec.HasField("strength") and not 0 < spec.strength <= 1:
        yield Violation(field="spec.strength", description="must be above 0 and at most 1")
    for name, known in _ENUMS.items():
        if getattr(spec, name) not in known:
            yield Violation(field=f"spec.{name}", description=f"unknown value {int(getattr(spec, name))}")


def takes_karras_sigmas(sampler: Sampler.ValueType) -> bool:
    """Return whether a sampler can use Karras sigmas."""
    return sampler in _KARRAS_SAMPLERS


def check_sigmas(spec: GenerationSpec, sampler: Sampler.ValueType) -> Iterator[Violation]:
    """Check that Karras sigmas are only requested with a sampler that can use them.

    Yields nothing if `check_ranges` finds the spec's sampler unknown.

    Args:
        sampler: The spec's sampler, or the model's default.
    """
    if spec.use_karras_sigmas and spec.sampler in _ENUMS["sampler"] and not takes_karras_sigmas(sampler):
        yield Violation(field="spec.use_karras_sigmas", description=f"only with the samplers {_KARRAS_NAMES}")


def check_techniques(spec: GenerationSpec) -> Iterator[Violation]:
    """Check the fields of `techniques`, each by itself."""
    if spec.techniques.HasField("cache_entry") and not _CACHE_ENTRY.fullmatch(spec.techniques.cache_entry):
        rule = "must be ENTRY@STEP as a provenance reported it: 32 hexadecimal digits, @ and a step"
        yield Violation(field="spec.techniques.cache_entry", description=rule)
    if spec.techniques.HasField("recording") and not _RECORDING.fullmatch(spec.techniques.recording):
        rule = "must be 32 hexadecimal digits, as the parameters of a provenance have it"
        yield Violation(field="spec.techniques.recording", description=rule)
    if spec.techniques.step_caching and spec.fidelity != Fidelity.FIDELITY_FAST:
        yield Violation(field="spec.techniques.step_caching", description="needs fidelity FAST")


def check_edit(spec: GenerationSpec) -> Iterator[Violation]:
    """Check that fields fit the presence or absence of a mask. Ranges and images are not checked."""
    present = {field.name for field, _ in spec.ListFields()}
    masked = "mask_image" in present
    if masked and "image" not in present:
        yield Violation(field="spec.mask_image", description="needs image, of which it selects the part to redraw")
    for name in _OF_MASKS:
        if name in present and not masked:
            yield Violation(field=f"spec.{name}", description="needs mask_image")
    if spec.techniques.HasField("recording") and not masked:
        yield Violation(field="spec.techniques.recording", description="needs mask_image")
    if "mask_feather" in present and "keep_unmasked" in present and not spec.keep_unmasked:
        rule = "must be absent with keep_unmasked false: there are no pixels of the image to fade into"
        yield Violation(field="spec.mask_feather", description=rule)
    if masked and spec.keep_for_editing:
        rule = "must be false with mask_image: only latents of whole pictures are kept"
        yield Violation(field="spec.keep_for_editing", description=rule)


def computes_part(spec: GenerationSpec) -> bool:
    """Return whether an edit may compute only the masked part of blocks, and reuse data of earlier jobs for the rest.

    False if the spec, which may lack defaults, is not an edit.
    """
    if not spec.HasField("keep_unmasked") and not spec.HasField("mask_image"):  # a complete spec has the first alone
        return False
    if spec.techniques.HasField("masked_blocks"):
        return spec.techniques.masked_blocks
    return spec.fidelity in (Fidelity.FIDELITY_BALANCED, Fidelity.FIDELITY_FAST)


def keeps_data(spec: GenerationSpec) -> bool:
    """Return whether workers keep data of the images, such as latents, for later edits of them."""
    return spec.keep_for_editing


def sequence_rule(most: int) -> str:
    """Return the rule for max_sequence_length. The model takes at most `most` tokens; 0 if it refuses the argument."""
    return f"must be 1 to {most} with this model" if most else "must be absent: this model has neither T5 nor Qwen3"


def clip_skip_rule(most: int) -> str:
    """Return the rule that a `clip_skip` above a model's largest one breaks."""
    if most:
        return f"must be 0 to {most} with this model, by the layers of its text encoders"
    return "must be 0 with this model, which reads no text encoder's states between layers"


def check_true_cfg(scale: float, *, taken: bool, has_negative: bool) -> Iterator[Violation]:
    """Check that classifier-free guidance beside an embedded guidance scale is only asked for where it is drawn.

    Args:
        scale: The spec's `true_cfg_scale`; up to 1 it is off.
    """
    if scale > 1.0 and not taken:
        rule = "must be at most 1, which is off: only models of Flux.1 take it, and Flux.1 Fill does not"
        yield Violation(field="spec.true_cfg_scale", description=rule)
    elif scale > 1.0 and not has_negative:
        yield Violation(field="spec.true_cfg_scale", description="needs negative_prompt, which may be empty")


def refuse_cfg_bounds(normalization: float, truncation: float) -> Iterator[Violation]:
    """Yield a violation if cfg_normalization or cfg_truncation is set for a model that does not support it."""
    for name, is_set, off in (("cfg_normalization", normalization > 0.0, 0), ("cfg_truncation", truncation < 1.0, 1)):
        if is_set:
            rule = f"must be {off}, which is off: only models of Z-Image take it"
            yield Violation(field=f"spec.{name}", description=rule)


def is_flow_matching(sampler: Sampler.ValueType) -> bool:
    """Return whether a sampler is for models that were trained with flow matching."""
    return sampler == Sampler.SAMPLER_FLOW_MATCH_EULER


def check_steps_left(steps: int, strength: float, *, flows: bool = False) -> Iterator[Violation]:
    """Check that image-to-image, which skips the first steps, has steps left. Diffusers refuses it otherwise.

    Yields nothing if `check_ranges` refuses one of the two values.
    """
    sensible = 0 < strength <= 1 and 0 < steps <= MAX_STEPS
    if sensible and steps_to_run(steps, strength, flows=flows) < 1:
        rule = f"leaves no denoising step: {steps} steps x {strength:g} is below 1; strength 1 makes all of them"
        yield Violation(field="spec.strength", description=rule)


def report_left_out(kind: str, reasons: Mapping[str, str]) -> list[LeftOut]:
    """Return a service's report of items that it does not host, within the limits of the contract.

    Args:
        kind: Kind of the items, as in Hosted.
        reasons: Reasons by name of the item.

    Returns:
        At most MAX_LEFT_OUT items. If there are more, the last one says how many others there are.
    """
    items = [
        LeftOut(kind=kind, name=_shortened(name, MAX_ADAPTER_CHARACTERS), reason=_shortened(reason))
        for name, reason in sorted(reasons.items())
    ]
    if len(items) <= MAX_LEFT_OUT:
        return items
    kept = items[: MAX_LEFT_OUT - 1]
    more = f"{len(items) - len(kept)} more are not hosted; the log of this service names them"
    return [*kept, LeftOut(kind=kind, name="...", reason=more)]


def is_adapter_name(name: str) -> bool:
    """Return whether the name is valid for a LoRA or a ControlNet.

    NAME is for all tenants; NAME@TENANT belongs to that tenant.
    """
    return len(name) <= MAX_ADAPTER_CHARACTERS and _ADAPTER_NAME.fullmatch(name) is not None


def is_digest(text: str) -> bool:
    """Return whether the text has the form of a SHA-256 in hex."""
    return _DIGEST.fullmatch(text) is not None


def is_cosine(number: float) -> bool:
    """Return whether a number can be a cosine; NaN cannot."""
    return -1 <= number <= 1


def refuse(violations: Sequence[Violation], kind: type[InvalidRequest] = InvalidRequest) -> None:
    """Raise InvalidRequest, or a subclass of it, if there are violations."""
    if violations:
        first = f"{violations[0].field}: {violations[0].description}"
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise kind(first + more, violations=violations)


def _shortened(text: str, most: int = MAX_REASON_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
