"""The encoded images that a spec carries in: which they are, and the spec without them. Decodes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import Message

from bottega.v1.generation_pb2 import GenerationSpec

# Fields that hold encoded images, of a spec and of what it is made of.
_IMAGES = frozenset({"image", "mask_image"})


def input_images(spec: GenerationSpec) -> Iterator[tuple[str, bytes]]:
    """Every input image, by the path of its field."""
    for name in ("image", "mask_image"):
        if spec.HasField(name):
            yield f"spec.{name}", getattr(spec, name)
    for index, net in enumerate(spec.controlnets):
        yield f"spec.controlnets[{index}].image", net.image


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
