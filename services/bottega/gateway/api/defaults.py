"""Fills in what a request left open, so that what is drawn is fully said. Knows the model's facts, no rules."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from bottega.planning import steps_to_run
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora
from bottega.v1.lora_pb2 import StoredLora

# Drawn seeds are short enough to be read out, and leave room for the other images.
_DRAWN_SEED_BITS = 32
STRENGTH = 0.3
_QUALITY = 90
# Of the steps that are made, that a LoRA without a profile may be late: Katz's bound, 10 of 50.
_LORA_SHARE = 0.2
# Diffusers'.
_CONTROLNET: Mapping[str, float] = MappingProxyType(
    {"controlnet_conditioning_scale": 1.0, "control_guidance_start": 0.0, "control_guidance_end": 1.0}
)


def complete(spec: GenerationSpec, model: image_pb2.Model, loras: Sequence[StoredLora] = ()) -> GenerationSpec:
    """A copy of `spec` with every default filled in and the seed drawn. `spec` has passed validation.

    loras: what the store has of each LoRA in the spec.
    """
    full = GenerationSpec()
    full.CopyFrom(spec)
    # Only a caller who gave a seed wants to see the same picture again.
    full.fidelity = spec.fidelity or (
        generation_pb2.FIDELITY_EXACT if spec.HasField("seed") else generation_pb2.FIDELITY_BALANCED
    )
    if not spec.HasField("seed"):
        full.seed = secrets.randbits(_DRAWN_SEED_BITS)
    full.model = model.name
    full.sampler = spec.sampler or model.default_sampler
    full.format = spec.format or generation_pb2.IMAGE_FORMAT_PNG
    full.width = spec.width if spec.HasField("width") else model.default_width
    full.height = spec.height if spec.HasField("height") else model.default_height
    full.num_images = spec.num_images if spec.HasField("num_images") else 1
    full.quality = spec.quality if spec.HasField("quality") else _QUALITY
    _complete_denoising(full, spec, model)
    for net in full.controlnets:
        _complete_controlnet(net)
    for lora, stored in zip(full.loras, loras, strict=True):
        _complete_lora(lora, stored, full)
    if any(lora.max_step and not lora.HasField("from_step") for lora in spec.loras) and not _may_come_late(full):
        # An EXACT that nobody asked for gives way, and what is drawn says so.
        full.techniques.bounded_lora_loading = True
    return full


def as_before(spec: GenerationSpec, drawn: GenerationSpec) -> GenerationSpec:
    """A copy of `spec`, completed as it was when it was drawn first: the same seed, and the defaults of then.

    drawn: what came of the same spec at that time, its input images removed.
    """
    full = GenerationSpec()
    full.CopyFrom(spec)
    for field, value in drawn.ListFields():
        if not field.is_repeated and field.message_type is None:
            setattr(full, field.name, value)
    if drawn.HasField("techniques"):
        full.techniques.CopyFrom(drawn.techniques)
    if drawn.loras:
        del full.loras[:]
        full.loras.extend(drawn.loras)
    return full


def _complete_denoising(full: GenerationSpec, spec: GenerationSpec, model: image_pb2.Model) -> None:
    full.num_inference_steps = spec.num_inference_steps if spec.HasField("num_inference_steps") else model.default_steps
    full.guidance_scale = spec.guidance_scale if spec.HasField("guidance_scale") else model.default_guidance_scale
    full.guidance_rescale = spec.guidance_rescale
    if spec.HasField("image"):
        full.strength = spec.strength if spec.HasField("strength") else STRENGTH


def _complete_lora(lora: Lora, stored: StoredLora, full: GenerationSpec) -> None:
    lora.digest = stored.digest
    if not lora.HasField("scale"):
        lora.scale = 1.0
    if not lora.HasField("max_step"):
        strength = full.strength if full.HasField("strength") else None
        steps = steps_to_run(full.num_inference_steps, strength)
        lora.max_step = _max_step(stored, steps) if _may_come_late(full) else 0


def _may_come_late(spec: GenerationSpec) -> bool:
    """Whether steps may be made without LoRAs: as the request says, else as its fidelity does."""
    if spec.techniques.HasField("bounded_lora_loading"):
        return spec.techniques.bounded_lora_loading
    return spec.fidelity in (generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST)


def _max_step(stored: StoredLora, steps: int) -> int:
    """As its profile says for the number of steps nearest to these, in proportion. steps: that are made."""
    if not stored.bounds:
        return int(steps * _LORA_SHARE)
    nearest = min(stored.bounds, key=lambda bound: abs(bound.num_inference_steps - steps))
    return nearest.max_step * steps // max(1, nearest.num_inference_steps)


def _complete_controlnet(net: ControlNet) -> None:
    for name, value in _CONTROLNET.items():
        if not net.HasField(name):  # type: ignore[arg-type]
            setattr(net, name, value)
