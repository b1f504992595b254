"""What the gateway reads from a GenerationSpec: its input images, its size in rows and steps, its latent."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from bottega.planning import Shape, rows_per_image
from bottega.planning import steps_to_run as steps_with
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec

# Fields that hold encoded images, of a spec and of the messages in it.
_IMAGES = frozenset({"image", "mask_image"})
# Characters kept of each text of a cancelled job: a line or two for whoever looks through a list. With texts of full
# length, 64 KiB of each job, a few thousand cancelled jobs were all that could be remembered.
KEPT_CHARACTERS = 200
_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
_CUT = "…"


def steps_to_run(spec: GenerationSpec) -> int:
    """Denoising steps of one image."""
    return steps_with(spec.num_inference_steps, spec.strength if spec.HasField("strength") else None)


def rows(spec: GenerationSpec) -> int:
    """Rows that a request puts into each turn."""
    return spec.num_images * rows_per_image(spec.guidance_scale)


def latent_shape(spec: GenerationSpec, model: image_pb2.Model) -> Shape:
    """Height and width of the latent."""
    factor = latent_scale(model)
    return spec.height // factor, spec.width // factor


def latent_scale(model: image_pb2.Model) -> int:
    """Pixels of an element of the latent, a side."""
    return max(1, model.vae_scale_factor or model.size_multiple)


def input_images(spec: GenerationSpec) -> Iterator[tuple[str, bytes]]:
    """Every input image, by the path of its field."""
    for name in ("image", "mask_image"):
        if spec.HasField(name):
            yield f"spec.{name}", getattr(spec, name)
    for index, net in enumerate(spec.controlnets):
        yield f"spec.controlnets[{index}].image", net.image


def has_images(spec: GenerationSpec) -> bool:
    """Whether it carries input images, and with them most of its bytes."""
    return spec.HasField("image") or spec.HasField("mask_image") or bool(spec.controlnets)


def without_images(spec: GenerationSpec) -> GenerationSpec:
    """A copy of `spec` without its input images, for answers and for the provenance.

    Field by field: an image that is copied and cleared again stays in the copy's memory for as long as that lives.
    """
    bare = GenerationSpec()
    _copy_fields(spec, bare)
    return bare


def with_short_texts(spec: GenerationSpec) -> GenerationSpec:
    """Return the spec to keep of a cancelled job: `spec`, or a copy whose long texts are cut."""
    long = [name for name in _TEXTS if _shortened(getattr(spec, name)) != getattr(spec, name)]
    prompts = [_shortened(prompt) for prompt in spec.prompts]
    if not long and prompts == spec.prompts:
        return spec
    kept = GenerationSpec()
    kept.CopyFrom(spec)
    for name in long:
        setattr(kept, name, _shortened(getattr(spec, name)))
    kept.prompts[:] = prompts
    return kept


def _shortened(text: str) -> str:
    return text if len(text) <= KEPT_CHARACTERS + len(_CUT) else text[:KEPT_CHARACTERS] + _CUT


def _copy_fields(source: Message, target: Message) -> None:
    for field in source.DESCRIPTOR.fields:
        if field.name in _IMAGES or (field.has_presence and not source.HasField(field.name)):
            continue
        value = getattr(source, field.name)
        if field.is_repeated:
            if field.message_type is None:
                getattr(target, field.name).extend(value)
                continue
            for element in value:
                _copy_fields(element, getattr(target, field.name).add())
        elif field.message_type is not None:
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)
