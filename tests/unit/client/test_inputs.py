"""Masks as callers give them: images as they are, boxes and ellipses drawn at the size of the image."""

from __future__ import annotations

import io
from typing import Any

import PIL.Image
import pytest

from bottega.client import Box, Ellipse
from bottega.client.types.options import spec_from
from bottega.errors import InvalidRequest

WIDTH, HEIGHT = 20, 12


def image(width: int = WIDTH, height: int = HEIGHT, *, orientation: int = 1) -> bytes:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    data = io.BytesIO()
    PIL.Image.new("RGB", (width, height), "red").save(data, "PNG", exif=exif)
    return data.getvalue()


def drawn(mask: Any, source: bytes | None = None) -> PIL.Image.Image:
    spec = spec_from("a star", {"image": image() if source is None else source, "mask_image": mask})
    return PIL.Image.open(io.BytesIO(spec.mask_image))


def refused(mask: Any, source: Any = None) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        spec_from("a star", {"mask_image": mask} if source is None else {"image": source, "mask_image": mask})
    return {violation.field: violation.description for violation in caught.value.violations}


def white(mask: PIL.Image.Image) -> set[tuple[int, int]]:
    assert mask.mode == "L"
    assert set(mask.tobytes()) <= {0, 255}
    return {(x, y) for x in range(mask.width) for y in range(mask.height) if mask.getpixel((x, y))}


def test_a_box_is_white_in_its_pixels_and_nowhere_else() -> None:
    mask = drawn(Box(3, 4, 5, 2))
    assert mask.size == (WIDTH, HEIGHT)
    assert white(mask) == {(x, y) for x in range(3, 8) for y in (4, 5)}


def test_an_ellipse_fills_its_box_but_the_corners() -> None:
    mask = white(drawn(Ellipse(2, 1, 12, 8)))
    assert (min(x for x, _ in mask), max(x for x, _ in mask)) == (2, 13)
    assert (min(y for _, y in mask), max(y for _, y in mask)) == (1, 8)
    assert not mask & {(2, 1), (13, 1), (2, 8), (13, 8)}
    assert white(drawn(Ellipse(5, 5, 1, 1))) == {(5, 5)}


def test_several_shapes_are_one_mask_and_what_lies_outside_is_left_out() -> None:
    mask = drawn([Box(-2, -2, 4, 3), Box(18, 11, 9, 9), Ellipse(9, 6, 1, 1)])
    assert white(mask) == {(0, 0), (1, 0), (18, 11), (19, 11), (9, 6)}


def test_shapes_are_in_the_pixels_of_the_image_as_it_is_turned() -> None:
    assert drawn(Box(0, 0, 1, 1), image(orientation=6)).size == (HEIGHT, WIDTH)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (Box(20, 0, 4, 4), "the box 20,0,4,4 is outside the image, which is 20x12"),
        (Box(0, 0, 0, 4), "the box 0,0,0,4 is empty: its width and height must be 1 or more"),
        (Box(0, 0, 1 << 40, 4), "must have whole numbers of pixels, at most 16384"),
        ([], "is an empty list: nothing would be redrawn"),
        (
            [Box(1, 1, 2, 2), "mask.png"],
            "must be an image, a Box, an Ellipse, or a list of Box and Ellipse; got 'mask.png'",
        ),
        ("no-such-mask.png", "no-such-mask.png cannot be read: No such file or directory"),
    ],
)
def test_what_can_be_no_mask_is_said_by_its_name(mask: Any, said: str) -> None:
    found = refused(mask, image())
    assert found.keys() == {"mask_image"}
    assert said in found["mask_image"]
