"""Rules of the LoRAs and ControlNets in a spec, and the control modes of ControlNet unions.

A control mode says what an image of a union shows, such as a pose or depth. Names and numbers are those of the
published unions: for SDXL xinsir's `controlnet-union-sdxl-1.0`, whose first form has the modes up to `segment`, and for
Flux.1 InstantX's `FLUX.1-dev-Controlnet-Union`. Other unions may give the numbers other meanings; a request can give
the number itself.

The argument `base` of functions is the name of the model's layout (`ControlLayout.base`); "" if the layout is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from bottega.errors import Violation
from bottega.planning import steps_to_run
from bottega.rules import (
    ADAPTER_NAMES,
    MAX_ADAPTERS,
    MAX_STEPS,
    MAX_TRIGGER_CHARACTERS,
    is_adapter_name,
    is_cosine,
    is_digest,
    is_flow_matching,
)
from bottega.v1.generation_pb2 import ControlNet, Fidelity, GenerationSpec, Lora
from bottega.v1.hosted_pb2 import ResidualProfile

# Bound on the modes of a union; published ones have 6 or 8.
MAX_MODES = 64
# Profiles of one ControlNet, one per base model.
MAX_PROFILES = 16
_MAX_HASH_CHARACTERS = 128
NO_CONTROLNETS = "must be empty with image: image-to-image of this model takes no ControlNets"
"""Why ControlNets are refused in image-to-image of a model that `strength_keeps_steps`."""
_OF_SDXL: Sequence[tuple[str, ...]] = (
    ("openpose",),
    ("depth",),
    ("hed", "pidi", "scribble", "ted"),
    ("canny", "lineart", "anime_lineart", "mlsd"),
    ("normal",),
    ("segment",),
    ("tile",),
    ("repaint",),
)
_OF_FLUX: Sequence[tuple[str, ...]] = (
    ("canny",),
    ("tile",),
    ("depth",),
    ("blur",),
    ("pose", "openpose"),
    ("gray",),
    ("low_quality",),
)
_NUMBERS = frozenset(map(str, range(MAX_MODES)))


def mode_number(mode: str, base: str = "") -> int | None:
    """Return the number of a mode that is given by name or number; None if there is no such mode."""
    if mode in _NUMBERS:
        return int(mode)
    return next((number for number, names in enumerate(_named(base)) if mode in names), None)


def is_mode(mode: str) -> bool:
    """Return whether any published union has a mode with this name or number."""
    return mode in _NUMBERS or any(mode in names for names in (*_OF_SDXL, *_OF_FLUX))


def mode_names(count: int, base: str = "") -> str:
    """Return the modes of a union with `count` modes, as text: the first name of each, or its number if it has no name.

    If `base` is "", only numbers are returned.
    """
    names = [names[0] for names in (_named(base) if base else ())[:count]]
    return ", ".join([*names, *_numbers(len(names), count)])


def list_modes(count: int | None = None, base: str = "") -> str:
    """Return the numbers and names of the first `count` modes, for errors. None lists all modes that have names."""
    named = [f"{number} ({', '.join(names)})" for number, names in enumerate(_named(base)[:count])]
    return ", ".join([*named, *_numbers(len(named), count or 0)])


def list_all_modes() -> str:
    """Return the names and numbers of the modes of all kinds of unions, for errors where the model is not known."""
    return f"{list_modes()}; with Flux.1 {list_modes(base=_FLUX_BASE)}"


def refused_mode(name: str, mode: int | str | None, modes: int, base: str) -> str:
    """Return why a ControlNet cannot be used with a mode; empty if it can.

    Args:
        name: Name of the ControlNet.
        mode: The mode of an image, as a number or as the request gives it; None if the request gives no mode.
        modes: Number of modes that the ControlNet has; 0 if it is not a union.
        base: Name of the model's layout.
    """
    if mode is None:
        return f"ControlNet {name} is a union and needs a control_mode: {list_modes(modes, base)}" if modes else ""
    if not modes:
        return (
            f"ControlNet {name} is not a union and has no control_mode {mode}; leave it out. "
            f"Unions have the modes {list_modes(base=base)}"
        )
    number = mode_number(str(mode), base)
    if number is None or number >= modes:
        return f"ControlNet {name} has no control_mode {mode}; it has {list_modes(modes, base)}"
    return ""


def check_union_images(nets: Sequence[tuple[str, bool]], base: str) -> Iterator[Violation]:
    """Check that a union for a UNet is a request's only ControlNet if it has several images, which it joins.

    A union with one image may be combined with other ControlNets. Diffusers' union pipelines do not allow that; here
    the residuals of all ControlNets are added, as Diffusers' MultiControlNetModel does.

    Args:
        nets: Name of each ControlNet, and whether its image has a mode.
        base: Name of the model's layout.
    """
    if _FLUX_BASE in base or len(set(nets)) == 1:
        return
    for index, net in enumerate(nets):
        if net[1] and net in nets[:index]:
            rule = "several images of one union cannot be combined with another ControlNet"
            yield Violation(field=f"spec.controlnets[{index}].name", description=rule)


def check_controlnets(spec: GenerationSpec) -> Iterator[Violation]:
    """Check the ControlNets of a spec, but not their images."""
    if len(spec.controlnets) > MAX_ADAPTERS:
        yield Violation(field="spec.controlnets", description=f"at most {MAX_ADAPTERS}")
    for index, net in enumerate(spec.controlnets[:MAX_ADAPTERS]):
        yield from _check_controlnet(f"spec.controlnets[{index}]", net)
    yield from _check_modes(spec.controlnets[:MAX_ADAPTERS])


def check_loras(spec: GenerationSpec) -> Iterator[Violation]:
    """Check the LoRAs of a spec, except for rules that depend on the number of steps."""
    if len(spec.loras) > MAX_ADAPTERS:
        yield Violation(field="spec.loras", description=f"at most {MAX_ADAPTERS}")
    for index, lora in enumerate(spec.loras[:MAX_ADAPTERS]):
        yield from _check_lora(f"spec.loras[{index}]", lora)
        if (lora.HasField("from_step"), lora.from_step) != (
            spec.loras[0].HasField("from_step"),
            spec.loras[0].from_step,
        ):
            rule = "must be that of the first LoRA: all are applied at one step"
            yield Violation(field=f"spec.loras[{index}].from_step", description=rule)
        if lora.measure_similarity and spec.controlnets:
            rule = "cannot be measured with ControlNets: remove them"
            yield Violation(field=f"spec.loras[{index}].measure_similarity", description=rule)


def check_lora_steps(
    spec: GenerationSpec, steps: int, strength: float | None, *, waits: str = ""
) -> Iterator[Violation]:
    """Check that no LoRA is applied after the last step, or too late for the caller or for a measurement.

    Yields nothing if other rules refuse the step or the strength.

    Args:
        spec: The spec as the caller sent it, or completed.
        steps: Denoising steps, including those that image-to-image skips.
        strength: Strength of image-to-image; None if it skips no step.
        waits: Result of `waits_for_loras`.
    """
    sensible = 0 < steps <= MAX_STEPS and (strength is None or 0 < strength <= 1)
    first = steps - steps_to_run(steps, strength, flows=is_flow_matching(spec.sampler)) if sensible else MAX_STEPS
    for index, lora in enumerate(spec.loras[:MAX_ADAPTERS]):
        path = f"spec.loras[{index}]"
        if lora.HasField("from_step") and 0 < steps <= lora.from_step <= MAX_STEPS:
            yield Violation(field=f"{path}.from_step", description=f"must be below the number of steps, {steps}")
        elif lora.measure_similarity and first < lora.from_step <= MAX_STEPS:
            rule = f"must be at most {first}, the first step, with measure_similarity: nothing is drawn without it"
            yield Violation(field=f"{path}.from_step", description=rule)
        elif waits and first < lora.from_step <= MAX_STEPS:
            rule = f"must be at most {first}, the first step, with {waits}: no step may run without the LoRA"
            yield Violation(field=f"{path}.from_step", description=rule)
        if lora.HasField("max_step") and 0 < steps < lora.max_step <= MAX_STEPS:
            yield Violation(field=f"{path}.max_step", description=f"must be at most the number of steps, {steps}")


def waits_for_loras(spec: GenerationSpec) -> str:
    """Return the field of a request that forbids steps without LoRAs, for error messages; empty if none does.

    EXACT as the default fidelity of a request with a seed does not forbid them: the fields of a single LoRA override
    it.

    Args:
        spec: The spec as the caller sent it.
    """
    if spec.techniques.HasField("bounded_lora_loading"):
        return "" if spec.techniques.bounded_lora_loading else "techniques.bounded_lora_loading false"
    if spec.fidelity == Fidelity.FIDELITY_EXACT:
        return "fidelity EXACT (unless techniques.bounded_lora_loading is true)"
    return ""


def check_lateness(spec: GenerationSpec) -> Iterator[Violation]:
    """Check that a request does not both allow and forbid steps without its LoRAs.

    If `from_step` is set, nothing depends on when the LoRA is loaded; see `check_lora_steps`.
    """
    why = waits_for_loras(spec)
    for index, lora in enumerate(spec.loras[:MAX_ADAPTERS] if why else ()):
        if lora.max_step > 0 and not lora.HasField("from_step"):
            rule = f"must be 0 or absent with {why}: that waits for LoRAs before the first step"
            yield Violation(field=f"spec.loras[{index}].max_step", description=rule)


def _check_lora(path: str, lora: Lora) -> Iterator[Violation]:
    if not is_adapter_name(lora.name):
        yield Violation(field=f"{path}.name", description=f"must be the name of a LoRA: {ADAPTER_NAMES}")
    if lora.HasField("scale") and not math.isfinite(lora.scale):
        yield Violation(field=f"{path}.scale", description="must be a finite number")
    if lora.HasField("digest") and not is_digest(lora.digest):
        yield Violation(field=f"{path}.digest", description="must be 64 hexadecimal digits, in lower case")
    if len(lora.token) > MAX_TRIGGER_CHARACTERS:
        yield Violation(field=f"{path}.token", description=f"must have at most {MAX_TRIGGER_CHARACTERS} characters")
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


def _check_modes(nets: Sequence[ControlNet]) -> Iterator[Violation]:
    """Check the modes of a request's ControlNets, except for the rules that depend on the model."""
    together = all(net.control_mode and net.name == nets[0].name for net in nets)
    for index, net in enumerate(nets):
        path = f"spec.controlnets[{index}]"
        if net.control_mode and not is_mode(net.control_mode):
            yield Violation(field=f"{path}.control_mode", description=f"must be one of {list_all_modes()}")
        if together and net.guess_mode != nets[0].guess_mode:
            rule = "must be that of the first image: a union computes its images together"
            yield Violation(field=f"{path}.guess_mode", description=rule)


def check_residual_profile(path: str, profile: ResidualProfile) -> Iterator[Violation]:
    """Check a ControlNet's profile. `path` is the field's path for violations."""
    if not 0 < len(profile.model_hash) <= _MAX_HASH_CHARACTERS:
        yield Violation(field=f"{path}.model_hash", description=f"must be 1 to {_MAX_HASH_CHARACTERS} characters")
    if not 1 <= profile.num_inference_steps <= MAX_STEPS:
        yield Violation(field=f"{path}.num_inference_steps", description=f"must be 1 to {MAX_STEPS}")
    if not is_cosine(profile.similarity):
        yield Violation(field=f"{path}.similarity", description="must be a cosine, -1 to 1")


# A layout whose name contains this text belongs to Flux.1.
_FLUX_BASE = " of flux "


def _named(base: str) -> Sequence[tuple[str, ...]]:
    """Return the names of each mode, by the mode's number."""
    return _OF_FLUX if _FLUX_BASE in base else _OF_SDXL


def _numbers(first: int, count: int) -> Sequence[str]:
    """Return the numbers from `first` to `count` - 1: as one range such as "8 to 11", or as a single number."""
    numbers = range(first, count)
    return [f"{numbers[0]} to {numbers[-1]}"] if len(numbers) > 1 else [str(number) for number in numbers]
