"""Rules of the contract that the gateway checks for callers, and the worker for itself: ranges and lengths of a spec.

Rules that depend on the model, on an image or on defaults are the gateway's own (gateway/api).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from bottega.errors import InvalidRequest, Violation
from bottega.latents import parse_start
from bottega.planning import steps_to_run
from bottega.v1.generation_pb2 import (
    SAMPLER_DPMPP_2M,
    SAMPLER_EULER,
    ControlNet,
    Fidelity,
    GenerationSpec,
    ImageFormat,
    Lora,
    Sampler,
)
from bottega.v1.hosted_pb2 import LeftOut, ResidualProfile

MAX_ADAPTERS = 8
# Of one ControlNet, one for each base model.
MAX_PROFILES = 16
MAX_IMAGES = 8
MAX_STEPS = 200
# In a ControlNet's folder, with those in it; a hub's repository of one has some tens.
MAX_CONTROLNET_FILES = 10_000
MAX_SIDE = 1 << 14
# A day: no engine takes so long to start, and one that was stopped meanwhile says no more.
MAX_START_S = 86_400.0
MAX_GUIDANCE_SCALE = 50
# Seeds of all images stay exactly representable in a JSON number.
MAX_SEED = 2**53 - MAX_IMAGES
# Of what is kept of one image: 90 steps of SDXL's at 1024x1024, in float16.
MAX_KEPT_LATENTS_BYTES = 12 << 20
# Jobs or adapters of one answer.
MAX_PAGE = 100

MAX_LEFT_OUT = 64
"""Things that a service may say it does not host."""
MAX_REASON_CHARACTERS = 512
"""Of a reason that a service reports to the fleet, for a person."""

MAX_PROMPT_BYTES = 16 << 10
MAX_MODEL_CHARACTERS = 200
_MAX_HASH_CHARACTERS = 128

# Of a LoRA or a ControlNet. A slash is as in hub names; no name ever becomes a path.
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/+-]*(@[a-z0-9-]{1,63})?")
MAX_ADAPTER_CHARACTERS = 200
ADAPTER_NAMES = "up to 200 letters, digits and . _ / + -, a letter or digit first; @TENANT behind a tenant's own"
_DIGEST = re.compile("[0-9a-f]{64}")
_RECORDING = re.compile("[0-9a-f]{32}")
_KARRAS_SAMPLERS = frozenset({SAMPLER_EULER, SAMPLER_DPMPP_2M})
# Of a mask; that of a boolean which is false says nothing.
_OF_MASKS = ("mask_alpha", "padding_mask_crop", "keep_unmasked", "mask_feather")
_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
RANGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "num_inference_steps": (1, MAX_STEPS),
        "guidance_scale": (0, MAX_GUIDANCE_SCALE),
        "guidance_rescale": (0, 1),
        "width": (1, MAX_SIDE),
        "height": (1, MAX_SIDE),
        "seed": (0, MAX_SEED),
        "num_images": (1, MAX_IMAGES),
        "quality": (1, 100),
        "padding_mask_crop": (0, 4096),
        "mask_feather": (0, 256),
    }
)
"""Lowest and highest value of every number of a spec whose range has both ends."""
# Every value of an enum that the contract knows, made once: asking the enum takes longer than the other rules.
_ENUMS: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "sampler": frozenset(Sampler.values()),
        "fidelity": frozenset(Fidelity.values()),
        "format": frozenset(ImageFormat.values()),
    }
)


def check_texts(spec: GenerationSpec) -> Iterator[Violation]:
    """Yield a violation for each text that is too long: a tokenizer reads all of it, however little counts."""
    texts = {name: getattr(spec, name) for name in _TEXTS}
    texts |= {f"prompts[{index}]": prompt for index, prompt in enumerate(spec.prompts[:MAX_IMAGES])}
    for name, text in texts.items():
        # The characters first: a text of some MiB need not be encoded to be too long.
        size = len(text) if len(text) > MAX_PROMPT_BYTES else len(text.encode())
        if size > MAX_PROMPT_BYTES:
            yield Violation(field=f"spec.{name}", description=f"is over {MAX_PROMPT_BYTES} bytes of UTF-8")


def check_prompts(spec: GenerationSpec) -> Iterator[Violation]:
    """Yield what is wrong with the several prompts of a spec, and what cannot be used beside them."""
    if not spec.prompts:
        return
    if len(spec.prompts) > MAX_IMAGES:
        yield Violation(field="spec.prompts", description=f"must be at most {MAX_IMAGES}")
        return
    if spec.prompt not in ("", spec.prompts[0]):
        yield Violation(field="spec.prompt", description="must be absent with prompts, or equal to the first of them")
    if spec.HasField("num_images") and spec.num_images != len(spec.prompts):
        rule = f"must be absent with prompts, or their number, {len(spec.prompts)}: each is drawn once"
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
    """Whether the name of the model is too long to be one. Who serves it is not looked at."""
    if len(spec.model) > MAX_MODEL_CHARACTERS:
        yield Violation(field="spec.model", description=f"must be at most {MAX_MODEL_CHARACTERS} characters")


def check_ranges(spec: GenerationSpec) -> Iterator[Violation]:
    """Which of the numbers and names that are there have a value that the contract does not know."""
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
    """Return whether a sampler has a choice of Karras' sigmas."""
    return sampler in _KARRAS_SAMPLERS


def check_sigmas(spec: GenerationSpec, sampler: Sampler.ValueType) -> Iterator[Violation]:
    """Yield a violation if Karras' sigmas are asked of a sampler without them.

    Silent where `check_ranges` has something to say about the spec's sampler.

    Args:
        spec: What a caller asks for.
        sampler: The spec's, or its model's default.
    """
    if spec.use_karras_sigmas and spec.sampler in _ENUMS["sampler"] and not takes_karras_sigmas(sampler):
        yield Violation(field="spec.use_karras_sigmas", description="only with the samplers EULER and DPMPP_2M")


def check_techniques(spec: GenerationSpec) -> Iterator[Violation]:
    """What is wrong with the switches for single techniques, each by itself."""
    if spec.techniques.HasField("cache_entry"):
        try:
            parse_start(spec.techniques.cache_entry)
        except ValueError:
            rule = "must be ENTRY@STEP as a provenance reported it: 32 hexadecimal digits, @ and a step"
            yield Violation(field="spec.techniques.cache_entry", description=rule)
    if spec.techniques.HasField("recording") and not _RECORDING.fullmatch(spec.techniques.recording):
        rule = "must be 32 hexadecimal digits, as the parameters of a provenance have it"
        yield Violation(field="spec.techniques.recording", description=rule)


def check_edit(spec: GenerationSpec) -> Iterator[Violation]:
    """What contradicts the mask of a spec, or needs one; ranges and the images themselves aside."""
    said = {field.name for field, _ in spec.ListFields()}
    masked = "mask_image" in said
    if masked and "image" not in said:
        yield Violation(field="spec.mask_image", description="needs image, which it says what to redraw of")
    for name in _OF_MASKS:
        if name in said and not masked:
            yield Violation(field=f"spec.{name}", description="needs mask_image")
    if spec.techniques.HasField("recording") and not masked:
        yield Violation(field="spec.techniques.recording", description="needs mask_image")
    if "mask_feather" in said and "keep_unmasked" in said and not spec.keep_unmasked:
        rule = "must be absent with keep_unmasked false: there are no pixels of the image to fade into"
        yield Violation(field="spec.mask_feather", description=rule)
    if masked and spec.keep_for_editing:
        rule = "must be false with mask_image: latents are kept of whole pictures, and edits of edits need none"
        yield Violation(field="spec.keep_for_editing", description=rule)


def check_steps_left(steps: int, strength: float) -> Iterator[Violation]:
    """Diffusers starts image-to-image at a later step, and refuses when no step would be left.

    Silent where `check_ranges` has something to say about one of the two.
    """
    sensible = 0 < strength <= 1 and 0 < steps <= MAX_STEPS
    if sensible and steps_to_run(steps, strength) < 1:
        rule = f"leaves no denoising step: {steps} steps x {strength:g} is below 1; strength 1 makes all of them"
        yield Violation(field="spec.strength", description=rule)


def report_left_out(kind: str, reasons: Mapping[str, str]) -> list[LeftOut]:
    """Return a service's report of things that it does not host, within the bounds of the contract.

    Args:
        kind: Of the things, as in Hosted.
        reasons: By name.

    Returns:
        At most MAX_LEFT_OUT; where there are more, the last one counts the others.
    """
    items = [
        LeftOut(kind=kind, name=_shortened(name, MAX_ADAPTER_CHARACTERS), reason=_shortened(reason))
        for name, reason in sorted(reasons.items())
    ]
    if len(items) <= MAX_LEFT_OUT:
        return items
    kept = items[: MAX_LEFT_OUT - 1]
    more = f"{len(items) - len(kept)} more are left out; the log of this service names them"
    return [*kept, LeftOut(kind=kind, name="...", reason=more)]


def is_adapter_name(name: str) -> bool:
    """Whether a LoRA or a ControlNet may be called so. NAME is for all tenants, NAME@TENANT that tenant's alone."""
    return len(name) <= MAX_ADAPTER_CHARACTERS and _ADAPTER_NAME.fullmatch(name) is not None


def check_controlnets(spec: GenerationSpec) -> Iterator[Violation]:
    """What is wrong with the ControlNets of a spec, their images aside."""
    if len(spec.controlnets) > MAX_ADAPTERS:
        yield Violation(field="spec.controlnets", description=f"at most {MAX_ADAPTERS}")
    for index, net in enumerate(spec.controlnets[:MAX_ADAPTERS]):
        yield from _check_controlnet(f"spec.controlnets[{index}]", net)


def check_loras(spec: GenerationSpec) -> Iterator[Violation]:
    """What is wrong with the LoRAs of a spec, whatever the number of its steps."""
    if len(spec.loras) > MAX_ADAPTERS:
        yield Violation(field="spec.loras", description=f"at most {MAX_ADAPTERS}")
    for index, lora in enumerate(spec.loras[:MAX_ADAPTERS]):
        yield from _check_lora(f"spec.loras[{index}]", lora)
        if (lora.HasField("from_step"), lora.from_step) != (
            spec.loras[0].HasField("from_step"),
            spec.loras[0].from_step,
        ):
            rule = "must be that of the first LoRA: all go in at one step"
            yield Violation(field=f"spec.loras[{index}].from_step", description=rule)
        if lora.measure_similarity and spec.controlnets:
            rule = "cannot be measured beside ControlNets: take them away"
            yield Violation(field=f"spec.loras[{index}].measure_similarity", description=rule)


def check_lora_steps(
    spec: GenerationSpec, steps: int, strength: float | None, *, waits: str = ""
) -> Iterator[Violation]:
    """Yield which LoRAs of a spec would go in after its last step, or too late for the caller or to be measured.

    Silent where other rules have something to say about a step, or about the strength, which is of image-to-image.

    Args:
        spec: As the caller sent it, or completed.
        steps: Denoising steps, those that image-to-image leaves out included.
        strength: Of image-to-image; None without an image.
        waits: By which words of the caller no step is made without LoRAs, see `waits_for_loras`; empty is none.
    """
    sensible = 0 < steps <= MAX_STEPS and (strength is None or 0 < strength <= 1)
    first = steps - steps_to_run(steps, strength) if sensible else MAX_STEPS
    for index, lora in enumerate(spec.loras[:MAX_ADAPTERS]):
        path = f"spec.loras[{index}]"
        if lora.HasField("from_step") and 0 < steps <= lora.from_step <= MAX_STEPS:
            yield Violation(field=f"{path}.from_step", description=f"must be below the number of steps, {steps}")
        elif lora.measure_similarity and first < lora.from_step <= MAX_STEPS:
            rule = f"must be at most {first}, the first step, with measure_similarity: nothing is drawn before it is in"
            yield Violation(field=f"{path}.from_step", description=rule)
        elif waits and first < lora.from_step <= MAX_STEPS:
            rule = f"must be at most {first}, the first step, with {waits}: no step is made without the LoRA then"
            yield Violation(field=f"{path}.from_step", description=rule)
        if lora.HasField("max_step") and 0 < steps < lora.max_step <= MAX_STEPS:
            yield Violation(field=f"{path}.max_step", description=f"must be at most the number of steps, {steps}")


def waits_for_loras(spec: GenerationSpec) -> str:
    """Return the request field that forbids steps without LoRAs, for error messages; empty if none does.

    A default fidelity of EXACT, which a seed brings, does not forbid them: the fields of a single LoRA override it.

    Args:
        spec: As the caller sent it.
    """
    if spec.techniques.HasField("bounded_lora_loading"):
        return "" if spec.techniques.bounded_lora_loading else "techniques.bounded_lora_loading false"
    if spec.fidelity == Fidelity.FIDELITY_EXACT:
        return "fidelity EXACT (unless techniques.bounded_lora_loading is true)"
    return ""


def check_lateness(spec: GenerationSpec) -> Iterator[Violation]:
    """Yield which LoRAs of a caller's spec may come late by one of its words, and may not by another.

    Where the step is pinned, nothing depends on when the LoRA comes; see `check_lora_steps`.
    """
    why = waits_for_loras(spec)
    for index, lora in enumerate(spec.loras[:MAX_ADAPTERS] if why else ()):
        if lora.max_step > 0 and not lora.HasField("from_step"):
            rule = f"must be 0 or absent with {why}: that waits for LoRAs before the first step"
            yield Violation(field=f"spec.loras[{index}].max_step", description=rule)


def is_digest(text: str) -> bool:
    """Whether it has the form of a SHA-256, hex."""
    return _DIGEST.fullmatch(text) is not None


def is_cosine(number: float) -> bool:
    """Whether it may be the cosine of two vectors; NaN may not."""
    return -1 <= number <= 1


def check_profile(path: str, profile: ResidualProfile) -> Iterator[Violation]:
    """What is wrong with a ControlNet's profile."""
    if not 0 < len(profile.model_hash) <= _MAX_HASH_CHARACTERS:
        yield Violation(field=f"{path}.model_hash", description=f"must be 1 to {_MAX_HASH_CHARACTERS} characters")
    if not 1 <= profile.num_inference_steps <= MAX_STEPS:
        yield Violation(field=f"{path}.num_inference_steps", description=f"must be 1 to {MAX_STEPS}")
    if not is_cosine(profile.similarity):
        yield Violation(field=f"{path}.similarity", description="must be a cosine, -1 to 1")


def refuse(violations: Sequence[Violation], kind: type[InvalidRequest] = InvalidRequest) -> None:
    """Raises InvalidRequest, or a kind of it, with all of them, if there are any."""
    if violations:
        first = f"{violations[0].field}: {violations[0].description}"
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise kind(first + more, violations=violations)


def _check_lora(path: str, lora: Lora) -> Iterator[Violation]:
    if not is_adapter_name(lora.name):
        yield Violation(field=f"{path}.name", description=f"must be the name of a LoRA: {ADAPTER_NAMES}")
    if lora.HasField("scale") and not math.isfinite(lora.scale):
        yield Violation(field=f"{path}.scale", description="must be a finite number")
    if lora.HasField("digest") and not is_digest(lora.digest):
        yield Violation(field=f"{path}.digest", description="must be 64 hexadecimal digits, in lower case")
    for name in ("from_step", "max_step"):
        if lora.HasField(name) and not 0 <= getattr(lora, name) <= MAX_STEPS:
            yield Violation(field=f"{path}.{name}", description=f"must be 0 to {MAX_STEPS}")


def _check_controlnet(path: str, net: ControlNet) -> Iterator[Violation]:
    if not is_adapter_name(net.name):
        yield Violation(field=f"{path}.name", description=f"must be the name of a ControlNet: {ADAPTER_NAMES}")
    if net.HasField("controlnet_conditioning_scale") and not math.isfinite(net.controlnet_conditioning_scale):
        yield Violation(field=f"{path}.controlnet_conditioning_scale", description="must be a finite number")
    start = net.control_guidance_start
    end = net.control_guidance_end if net.HasField("control_guidance_end") else 1.0
    # Written so that NaN breaks the rule.
    if not 0 <= start < end <= 1:
        rule = f"0 <= start < end <= 1 must hold; start is {start:g} and end {end:g}"
        yield Violation(field=f"{path}.control_guidance_start", description=rule)


def _shortened(text: str, most: int = MAX_REASON_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
