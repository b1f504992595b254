"""Images that requests bring along are of the size and share that they should be, and the same each time."""

from __future__ import annotations

import io
from dataclasses import replace

import PIL.Image
import pytest

from load.replay.mix import AdapterShape, Mix
from load.replay.pictures import Pictures
from load.replay.plan import plan

REQUESTS = plan(Mix(minutes=1.0, controlnets=AdapterShape(names=("edges",))), 1)
EDITS = [request for request in REQUESTS if request.kind == "edit"]
DRAWS = [request for request in REQUESTS if request.controlnets]


def opened(data: bytes) -> PIL.Image.Image:
    return PIL.Image.open(io.BytesIO(data))


def test_masks_lie_in_the_template_and_have_their_share_of_it() -> None:
    pictures = Pictures(width=512, height=256)
    for request in EDITS:
        box = pictures.mask(request)
        assert 0 <= box.x <= 512 - box.width
        assert 0 <= box.y <= 256 - box.height
        assert request.mask_ratio is not None
        assert box.width * box.height / (512 * 256) == pytest.approx(request.mask_ratio, abs=0.01)
    assert len({(box.x, box.y) for box in map(pictures.mask, EDITS)}) > len(EDITS) / 2
    with pytest.raises(ValueError, match="a draw has no mask"):
        pictures.mask(DRAWS[0])
    least = pictures.mask(replace(EDITS[0], mask_ratio=1e-6))
    assert (least.width, least.height) == (8, 8)


def test_templates_differ_and_are_the_same_each_time() -> None:
    first, again = Pictures(width=64, height=48), Pictures(width=64, height=48)
    first.prepare(REQUESTS)
    assert [first.template(rank) for rank in range(5)] == [again.template(rank) for rank in range(5)]
    assert len({first.template(rank) for rank in range(20)}) > 15
    assert opened(first.template(0)).size == (64, 48)
    assert opened(first.control_image(DRAWS[0])).size == (64, 48)
    assert first.control_image(DRAWS[0]) == again.control_image(DRAWS[0])


def test_as_many_control_images_differ_as_there_are() -> None:
    pictures = Pictures(width=32, height=32)
    assert 8 < len({pictures.control_image(request) for request in DRAWS}) <= 16
