"""The mask of an edit as callers give it: an image, or boxes and ellipses that are drawn at the size of the image.

White parts of a mask are redrawn. The services interpret grey values as Diffusers does.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bottega import rules
from bottega.client.types.image_source import ImageSource, set_image, size_of
from bottega.client.types.messages import describe
from bottega.errors import BadImage, Violation
from bottega.v1.generation_pb2 import GenerationSpec

if TYPE_CHECKING:
    from bottega.codec import ImageSize

MASK_OPTIONS = frozenset({"mask_alpha", "padding_mask_crop", "keep_unmasked", "mask_feather"})
"""Arguments of edits only: a picture that was drawn with one of them is an edit."""

_NAME = "mask_image"


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
    """Set the mask in a spec that has its image already, or yield why that is impossible. Shapes become one mask."""
    shapes = [mask] if isinstance(mask, Box | Ellipse) else mask
    if not isinstance(shapes, list | tuple):
        yield from set_image(spec, mask, name=_NAME)
    elif broken := list(_check_shapes(shapes)):
        yield from broken
    elif not spec.HasField("image"):
        yield Violation(field=_NAME, description="is drawn at the size of image, which is missing or cannot be sent")
    else:
        yield from _set_drawn(spec, shapes)


def _check_shapes(shapes: Sequence[object]) -> Iterator[Violation]:
    """Yield the rules that shapes break for any image."""
    if not shapes:
        yield Violation(field=_NAME, description="is an empty list: nothing would be redrawn")
    for shape in shapes:
        if not isinstance(shape, Box | Ellipse):
            rule = f"must be an image, a Box, an Ellipse, or a list of the last two; got {describe(shape)}"
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
    """Return whether at least a part of a shape is inside the image."""
    across = shape.x < size.width and shape.x + shape.width > 0
    return across and shape.y < size.height and shape.y + shape.height > 0


def _draw(shapes: Sequence[MaskShape], size: ImageSize) -> bytes:
    """Return a grey PNG of this size that is white in every shape."""
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
