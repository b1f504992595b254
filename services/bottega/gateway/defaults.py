"""Fills in what a request left open, so that what is drawn is fully said. Knows the model's facts, no rules."""

from __future__ import annotations

import secrets

from google.protobuf.message import Message

from bottega.planning.cost import Shape
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec

# Drawn seeds are short enough to be read out, and leave room for the other images.
_DRAWN_SEED_BITS = 32
_STRENGTH = 0.3
# Fields that hold encoded images, of a spec and of what it is made of.
_IMAGES = frozenset({"image", "mask_image"})
_QUALITY = 90


def complete(spec: GenerationSpec, model: image_pb2.Model) -> GenerationSpec:
    """A copy of `spec` with every default filled in and the seed drawn. `spec` has passed validation."""
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
    return full


def _complete_denoising(full: GenerationSpec, spec: GenerationSpec, model: image_pb2.Model) -> None:
    full.num_inference_steps = spec.num_inference_steps if spec.HasField("num_inference_steps") else model.default_steps
    full.guidance_scale = spec.guidance_scale if spec.HasField("guidance_scale") else model.default_guidance_scale
    full.guidance_rescale = spec.guidance_rescale
    if spec.HasField("image"):
        full.strength = spec.strength if spec.HasField("strength") else _STRENGTH


def without_images(spec: GenerationSpec) -> GenerationSpec:
    """A copy of `spec` without its input images, for answers and for the provenance.

    Field by field: an image that is copied and cleared again stays in the copy's memory for as long as that lives.
    """
    bare = GenerationSpec()
    _copy_fields(spec, bare)
    return bare


def has_images(spec: GenerationSpec) -> bool:
    """Whether it carries input images, and with them most of its bytes."""
    return spec.HasField("image") or spec.HasField("mask_image") or bool(spec.controlnets)


def _copy_fields(source: Message, target: Message) -> None:
    for field in source.DESCRIPTOR.fields:
        if field.name in _IMAGES or (field.has_presence and not source.HasField(field.name)):
            continue
        value = getattr(source, field.name)
        if field.is_repeated:
            for element in value:
                _copy_fields(element, getattr(target, field.name).add())
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def steps_to_run(spec: GenerationSpec) -> int:
    """Denoising steps of one image; image-to-image starts later, as in Diffusers."""
    steps = spec.num_inference_steps
    return min(int(steps * spec.strength), steps) if spec.HasField("strength") else steps


def rows(spec: GenerationSpec) -> int:
    """Rows that a request puts into each turn: guidance needs two an image."""
    return spec.num_images * (2 if spec.guidance_scale > 1 else 1)


def latent_shape(spec: GenerationSpec, model: image_pb2.Model) -> Shape:
    """Height and width of the latent."""
    factor = max(1, model.vae_scale_factor or model.size_multiple)
    return spec.height // factor, spec.width // factor
