"""Edits in codec processes: what is drawn, what is encoded, and the largest images within the limits of a call."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from bottega.codec import ImageSize, MaskOrder, Overlay, edits
from bottega.codec.pool import CodecPool
from bottega.v1.generation_pb2 import IMAGE_FORMAT_PNG
from tests.samples.edits import box_mask, template
from tests.samples.hostile_images import saved

pytestmark = pytest.mark.asyncio(loop_scope="module")

CUT = MaskOrder(width=64, height=64, latent_scale=8, padding=6)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[CodecPool]:
    pool = CodecPool(processes=1)
    await pool.start()
    yield pool
    await pool.stop()


async def test_an_edit_goes_to_a_process_and_back_as_it_is(pool: CodecPool) -> None:
    image, mask = saved(template(160, 120), "JPEG"), saved(box_mask((30, 40, 70, 90), 160, 120))
    edit = await pool.decode_edit(image, mask, CUT)
    assert edit == edits.decode(image, mask, CUT)
    assert edit.facts.size == ImageSize(width=160, height=120)
    assert edit.crop is not None
    assert (await pool.decode(image, 64, 64, crop=edit.crop)).pixels == edit.pixels

    overlay = Overlay(image=image, mask=mask, order=CUT, feather=3)
    encoded = await pool.encode(edit.pixels, IMAGE_FORMAT_PNG, 90, {}, overlay=overlay)
    with Image.open(io.BytesIO(encoded.data)) as result:
        drawn = Image.frombytes("RGB", (64, 64), edit.pixels.data)
        assert np.array_equal(np.asarray(result), np.asarray(edits.composed(drawn, overlay)))
        assert result.size == (160, 120)


@pytest.mark.parametrize("size", [pytest.param((16000, 300), marks=pytest.mark.slow), (300, 16000)])
async def test_a_part_far_wider_or_higher_than_what_was_drawn_is_put_back(
    pool: CodecPool, size: tuple[int, int]
) -> None:
    """Covered as a whole by the square that was drawn, it would be a gigabyte."""
    mask = Image.new("L", size)
    mask.paste(255, (size[0] // 100, size[1] // 100, size[0], size[1]))
    image = saved(template(*size))
    edit = await pool.decode_edit(image, saved(mask), CUT)
    overlay = Overlay(image=image, mask=saved(mask), order=CUT, keep_unmasked=False)
    encoded = await pool.encode(edit.pixels, IMAGE_FORMAT_PNG, 90, {}, overlay=overlay)
    seen = await pool.inspect(encoded.data)
    assert (seen.width, seen.height) == size


@pytest.mark.slow
async def test_the_largest_images_are_edited_within_the_limits(pool: CodecPool) -> None:
    """16 megapixels each, with several channels, cut, and faded over the widest feather."""
    mask = Image.new("RGB", (4096, 4096))
    mask.paste("white", (300, 300, 3800, 3800))
    order = MaskOrder(width=1024, height=1024, latent_scale=8, padding=20)
    large = saved(template(512, 512).resize((4096, 4096))), saved(mask)
    edit = await pool.decode_edit(*large, order)
    for keep_unmasked in (True, False):
        overlay = Overlay(image=large[0], mask=large[1], order=order, keep_unmasked=keep_unmasked, feather=256)
        encoded = await pool.encode(edit.pixels, IMAGE_FORMAT_PNG, 90, {}, overlay=overlay)
        assert (await pool.inspect(encoded.data)).width == 4096
