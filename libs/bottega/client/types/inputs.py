"""The inputs of a request (images, masks, ControlNets and LoRAs), and their conversion to messages.

An image is encoded bytes, a path, a Pillow image or a Picture. A mask is an image, or boxes and ellipses that are drawn
at the size of the image. White parts of a mask are redrawn. The services interpret grey values as Diffusers does.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bottega import rules
from bottega.client.types.messages import UNSENDABLE, describe, set_field
from bottega.client.types.picture import Picture
from bottega.errors import BadImage, Violation
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

if TYPE_CHECKING:
    from bottega.codec import ImageSize

MASK_OPTIONS = frozenset({"mask_alpha", "padding_mask_crop", "keep_unmasked", "mask_feather"})
"""Arguments that only edits have: a picture that was drawn with one of them is an edit."""

_NAME = "mask_image"


class PillowImage(Protocol):
    """The interface of a Pillow image, so that the SDK need not import Pillow."""

    def save(self, fp: Any, format: str | None = None) -> None: ...


ImageSource = bytes | str | os.PathLike[str] | PillowImage | Picture

# Errors of Pillow for an image whose mode PNG does not have, or that has been closed, and of files.
_NO_IMAGE = (AttributeError, OSError, TypeError, ValueError)


def set_image(
    message: GenerationSpec | generation_pb2.ControlNet, image: object, *, name: str = "image", path: str | None = None
) -> Iterator[Violation]:
    """Set an image in a message, or yield why that is impossible.

    Args:
        name: The message's field.
        path: The caller's name of the field; None if it is `name`.
    """
    try:
        setattr(message, name, _encoded(image))
    except _NO_IMAGE as error:
        yield Violation(field=path or name, description=str(error))


def size_of(image: bytes | Path) -> ImageSize:
    """Return the width and height of an image in pixels, after the rotation in its EXIF data.

    Raises:
        BadImage: The services would refuse the image.
        OSError: The file cannot be read.
    """
    from bottega.codec.images import inspect

    return inspect(image if isinstance(image, bytes) else image.read_bytes())


def _encoded(image: Any) -> bytes:
    """Return an image as encoded bytes. Raise one of _NO_IMAGE if that is impossible."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, Picture):
        return image.data
    if isinstance(image, str | os.PathLike):
        return _read(image)
    if not hasattr(image, "save"):
        raise TypeError(f"must be bytes, a path, a Pillow image or a Picture; got {type(image).__name__}")
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}") from None
    except UNSENDABLE:
        raise ValueError(f"{describe(path)} cannot be the path of a file") from None


@dataclass(frozen=True, slots=True)
class ControlNet:
    """A ControlNet to draw with: `ControlNet("edges", "edges.png", controlnet_conditioning_scale=0.8)`.

    The engine has a class of the same name, which is the loaded network.
    """

    name: str
    """Name of the ControlNet, as controlnets() and adapters() list it."""
    image: ImageSource | None = field(default=None, repr=False)
    """Control image: encoded bytes, a path, a Pillow image or a Picture. It is resized to the picture's size. None in
    the parameters of an earlier picture, which do not contain it."""
    controlnet_conditioning_scale: float | None = field(default=None, kw_only=True)
    """Strength; None for 1, or .8 in image-to-image, as in Diffusers."""
    control_guidance_start: float = field(default=0.0, kw_only=True)
    """Fraction of the steps at which the ControlNet begins to act, 0 to 1."""
    control_guidance_end: float = field(default=1.0, kw_only=True)
    """Fraction of the steps at which the ControlNet stops acting, 0 to 1."""
    control_mode: str | int | None = field(default=None, kw_only=True)
    """What the image shows, if the ControlNet is a union; None for other ControlNets. Its number, or its name: for SDXL
    "openpose", "depth", "hed", "canny", "normal", "segment", "tile", "repaint"; for Flux.1 "canny", "tile", "depth",
    "blur", "pose", "gray", "low_quality"."""
    guess_mode: bool = field(default=False, kw_only=True)
    """Whether the ControlNet steers only the conditional prediction of classifier-free guidance."""
    measure_similarity: bool = field(default=False, kw_only=True)
    """Whether to measure how similar the residuals of adjacent steps are; the provenance has the result."""


_NUMBERS = ("controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end")


def add_controlnets(spec: GenerationSpec, nets: object) -> Iterator[Violation]:
    """Add a request's ControlNets to its spec, and yield violations. Images that are paths are read."""
    if not isinstance(nets, list | tuple):
        yield Violation(field="controlnets", description=f"must be a list of ControlNet; got {type(nets).__name__}")
        return
    for index, net in enumerate(nets):
        path = f"controlnets[{index}]"
        if isinstance(net, ControlNet):
            yield from _add_controlnet(spec.controlnets.add(), net, path)
        else:
            yield Violation(field=path, description=f"must be a ControlNet; got {type(net).__name__}")


def controlnet_from(message: generation_pb2.ControlNet) -> ControlNet:
    """Return the ControlNet of a spec, without its image."""
    end = message.control_guidance_end if message.HasField("control_guidance_end") else 1.0
    scale = message.controlnet_conditioning_scale if message.HasField("controlnet_conditioning_scale") else None
    return ControlNet(
        message.name,
        controlnet_conditioning_scale=scale,
        control_guidance_start=message.control_guidance_start,
        control_guidance_end=end,
        control_mode=message.control_mode or None,
        guess_mode=message.guess_mode,
        measure_similarity=message.measure_similarity,
    )


def _add_controlnet(message: generation_pb2.ControlNet, net: ControlNet, path: str) -> Iterator[Violation]:
    for name in ("name", "guess_mode", "measure_similarity", *_NUMBERS):
        if (value := getattr(net, name)) is not None:
            yield from set_field(message, name, value, path=f"{path}.{name}")
    if net.control_mode is not None:
        # 0 is a mode, and True is none.
        number = isinstance(net.control_mode, int) and not isinstance(net.control_mode, bool)
        mode = str(net.control_mode) if number else net.control_mode
        yield from set_field(message, "control_mode", mode, path=f"{path}.control_mode")
    if net.image is None:
        yield Violation(field=f"{path}.image", description="is missing: give bytes, a path or a Pillow image")
    else:
        yield from set_image(message, net.image, path=f"{path}.image")


@dataclass(frozen=True, slots=True)
class Lora:
    """A LoRA to draw with: `Lora("outline", 0.8)`. A tuple of name and scale, or the name alone, means the same.

    `Lora("cat")` may also be a textual inversion embedding, whose token stands in a prompt. It has no scale
    and no `max_step`.
    """

    name: str
    """Name of the LoRA or embedding, as loras() and adapters() list it."""
    scale: float = 1.0
    """Strength."""
    from_step: int | None = None
    """First step that uses the LoRA; the same for all LoRAs of a request. None means as soon as it is loaded, at
    `max_step` at the latest. A provenance has the step; with it and `digest` the same picture is drawn again. A step
    after the first one needs bounded_lora_loading=True with fidelity="exact"."""
    digest: str | None = None
    """Hash of the LoRA's weights, as a provenance has it; None for the current weights."""
    max_step: int | None = None
    """Latest first step that uses the LoRA, if `from_step` is None. None means that of the LoRA's profile, or 0 in an
    exact request. More than 0 needs bounded_lora_loading=True with fidelity="exact"."""
    measure_similarity: bool = False
    """Whether to draw the request a second time without the LoRA, and record in the provenance how similar the latents
    are."""


LoraLike = Lora | tuple[str, float] | str

_OPTIONAL = ("from_step", "digest", "max_step")


def add_loras(spec: GenerationSpec, loras: object) -> Iterator[Violation]:
    """Add a request's LoRAs to its spec, and yield violations."""
    if not isinstance(loras, list | tuple):
        yield Violation(field="lora", description=f"must be a list of LoRAs; got {type(loras).__name__}")
        return
    for index, given in enumerate(loras):
        path = f"lora[{index}]"
        lora = _as_lora(given)
        if lora is None:
            yield Violation(
                field=path, description=f"must be a Lora, a name, or a name and a scale; got {describe(given)}"
            )
        else:
            yield from _add_lora(spec.loras.add(), lora, path)


def lora_from(message: generation_pb2.Lora) -> Lora:
    """Return the LoRA of a spec."""
    values = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}  # type: ignore[arg-type]
    scale = message.scale if message.HasField("scale") else 1.0
    return Lora(message.name, scale, **values, measure_similarity=message.measure_similarity)


def _as_lora(given: object) -> Lora | None:
    match given:
        case Lora():
            return given
        case str():
            return Lora(given)
        case (str() as name, int() | float() as scale):
            return Lora(name, scale)
    return None


def _add_lora(message: generation_pb2.Lora, lora: Lora, path: str) -> Iterator[Violation]:
    for name in ("name", "scale", *_OPTIONAL, "measure_similarity"):
        value = getattr(lora, name)
        if value is not None or name not in _OPTIONAL:
            yield from set_field(message, name, value, path=f"{path}.{name}")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle to redraw, in pixels of the image: `Box(8, 16, 32, 32)`."""

    x: int
    """Left edge, from 0."""
    y: int
    """Upper edge, from 0."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Ellipse:
    """An ellipse to redraw, given by the rectangle that it fills, in pixels of the image."""

    x: int
    """Left edge of the rectangle, from 0."""
    y: int
    """Upper edge of the rectangle, from 0."""
    width: int
    height: int


MaskShape = Box | Ellipse
MaskSource = ImageSource | MaskShape | Sequence[MaskShape]


def set_mask(spec: GenerationSpec, mask: object) -> Iterator[Violation]:
    """Set the mask in a spec that has its image, or yield why that is impossible. Shapes are drawn into one mask."""
    shapes = [mask] if isinstance(mask, Box | Ellipse) else mask
    if not isinstance(shapes, list | tuple):
        yield from set_image(spec, mask, name=_NAME)
    elif broken := list(_check_shapes(shapes)):
        yield from broken
    elif not spec.HasField("image"):
        yield Violation(field=_NAME, description="needs the size of image, which is missing or cannot be sent")
    else:
        yield from _set_drawn(spec, shapes)


def _check_shapes(shapes: Sequence[object]) -> Iterator[Violation]:
    """Yield the violations of shapes that do not depend on the image."""
    if not shapes:
        yield Violation(field=_NAME, description="is an empty list: nothing would be redrawn")
    for shape in shapes:
        if not isinstance(shape, Box | Ellipse):
            rule = f"must be an image, a Box, an Ellipse, or a list of Box and Ellipse; got {describe(shape)}"
            yield Violation(field=_NAME, description=rule)
        elif not all(map(_is_pixels, _numbers(shape))):
            rule = f"must have whole numbers of pixels, at most {rules.MAX_SIDE}: {describe(str(shape))}"
            yield Violation(field=_NAME, description=rule)
        elif shape.width < 1 or shape.height < 1:
            rule = f"{_named(shape)} is empty: its width and height must be 1 or more"
            yield Violation(field=_NAME, description=rule)


def _set_drawn(spec: GenerationSpec, shapes: Sequence[MaskShape]) -> Iterator[Violation]:
    try:
        size = size_of(spec.image)
    except BadImage as error:
        yield Violation(field="image", description=error.message)
        return
    outside = [shape for shape in shapes if not _is_inside(shape, size)]
    for shape in outside:
        rule = f"{_named(shape)} is outside the image, which is {size.width}x{size.height}"
        yield Violation(field=_NAME, description=rule)
    if not outside:
        spec.mask_image = _draw(shapes, size)


def _is_inside(shape: MaskShape, size: ImageSize) -> bool:
    across = shape.x < size.width and shape.x + shape.width > 0
    return across and shape.y < size.height and shape.y + shape.height > 0


def _draw(shapes: Sequence[MaskShape], size: ImageSize) -> bytes:
    """Return a greyscale PNG mask of this size: white inside the shapes, black elsewhere."""
    import PIL.Image
    import PIL.ImageDraw

    mask = PIL.Image.new("L", (size.width, size.height))
    pen = PIL.ImageDraw.Draw(mask)
    for shape in shapes:
        corners = (shape.x, shape.y, shape.x + shape.width - 1, shape.y + shape.height - 1)
        # Pillow draws nothing for an ellipse of one pixel.
        is_box = isinstance(shape, Box) or min(shape.width, shape.height) == 1
        draw = pen.rectangle if is_box else pen.ellipse
        draw(corners, fill=255)
    buffer = io.BytesIO()
    mask.save(buffer, format="PNG")
    return buffer.getvalue()


def _is_pixels(number: object) -> bool:
    return isinstance(number, int) and abs(number) <= rules.MAX_SIDE


def _numbers(shape: MaskShape) -> tuple[int, int, int, int]:
    return shape.x, shape.y, shape.width, shape.height


def _named(shape: MaskShape) -> str:
    return f"the {type(shape).__name__.lower()} {','.join(map(str, _numbers(shape)))}"
