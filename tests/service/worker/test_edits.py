"""An edit at a worker's front, with an engine that follows a script: what the engine gets, and what comes of it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageCms

from bottega.codec.metadata import PARAMETERS_KEYWORD, SUMMARY_KEYWORD, read_exif_texts
from bottega.v1 import error_pb2, generation_pb2, worker_pb2
from tests.samples.edits import box_mask, template
from tests.samples.hostile_images import saved
from tests.support.running_front import Running, images, kinds, request, running_workers

# One worker for all tests here.
pytestmark = pytest.mark.asyncio(loop_scope="module")

FEATHER = 3
# What the script's engine draws.
LEVEL = 7


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Running]:
    async with running_workers() as start:
        yield await start()


def edit(image: bytes, mask: bytes, **fields: object) -> worker_pb2.RunAttemptRequest:
    """An edit of 64x64 pixels. fields: of its spec."""
    order = request(image=image)
    said = generation_pb2.GenerationSpec(
        width=64, height=64, mask_image=mask, strength=0.9999, keep_unmasked=True, mask_feather=FEATHER
    )
    order.spec.MergeFrom(said)
    order.spec.MergeFrom(generation_pb2.GenerationSpec(**fields))  # type: ignore[arg-type]
    return order


def pixels(data: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def around(box: tuple[int, int, int, int], by: int) -> tuple[slice, slice]:
    """Rows and columns of the box, grown."""
    left, top, right, bottom = box
    return slice(max(0, top - by), bottom + by), slice(max(0, left - by), right + by)


BOX = (12, 20, 40, 52)


async def test_the_unmasked_pixels_stay_and_the_provenance_says_what_the_mask_was(running: Running) -> None:
    image, mask = saved(template()), saved(box_mask(BOX).resize((128, 96)).convert("RGB"))
    order = edit(image, mask)
    events = await running.events(order)
    assert kinds(events)[-1] == "completed"
    drawn, original = pixels(images(events)[0]), np.asarray(template())
    outside = np.ones((64, 64), bool)
    outside[around(BOX, FEATHER)] = False
    assert (drawn[outside] == original[outside]).all()
    assert (drawn[around(BOX, -1)] == LEVEL).all()
    provenance = events[-1].completed.provenance
    use = provenance.mask
    assert (use.width, use.height, use.resized, use.converted, use.crop_width) == (128, 96, True, True, 0)
    assert use.share == pytest.approx(28 * 32 / 64**2, abs=0.03)
    assert use.digest == hashlib.sha256(mask).hexdigest()
    assert provenance.image_digest == hashlib.sha256(image).hexdigest()
    assert not provenance.parameters.HasField("mask_image")


async def test_control_images_are_cut_as_the_image_is(running: Running) -> None:
    image, mask = template(200, 150), box_mask((60, 70, 90, 100), 200, 150)
    control = image.rotate(180)
    order = edit(saved(image), saved(mask), prompt="controlled", padding_mask_crop=16, keep_unmasked=False)
    order.spec.ClearField("mask_feather")
    order.spec.controlnets.add(name="edges", image=saved(control.resize((400, 300))))
    drawn = pixels(images(await running.events(order))[0])[71:99, 61:89].astype(int)
    off = np.abs(drawn - np.asarray(control)[71:99, 61:89])
    assert off.max() < 6


async def test_it_is_said_of_which_control_images_the_transparency_was_not_looked_at(running: Running) -> None:
    lines = Image.new("RGBA", (64, 64))
    lines.paste((0, 0, 0, 255), (8, 8, 56, 12))
    deep = Image.fromarray(np.full((64, 64), 30_000, np.uint16))
    order = request(prompt="controlled")
    for name, image in (("opaque", template()), ("lines", lines), ("deep", deep)):
        order.spec.controlnets.add(name=name, image=saved(image))
    uses = (await running.events(order))[-1].completed.provenance.controlnets
    assert [(use.name, use.transparency_unread, use.scaled_from_16_bits) for use in uses] == [
        ("opaque", False, False),
        ("lines", True, False),
        ("deep", False, True),
    ]


def cut_out() -> Image.Image:
    """A picture that is transparent in its upper half."""
    image = template().convert("RGBA")
    image.putalpha(box_mask((0, 32, 64, 64)))
    return image


SECRETS = (b"a house", b"a camera", b"its number", b"a remark", b"a place")
KEYWORDS = {PARAMETERS_KEYWORD, SUMMARY_KEYWORD}


def photograph() -> Image.Exif:
    """Return EXIF data of every kind that a camera writes, with SECRETS in it."""
    description, maker, note, remark, place = SECRETS
    exif = Image.Exif()
    exif[ExifTags.Base.ImageDescription], exif[ExifTags.Base.Make] = description.decode(), maker.decode()
    exif[ExifTags.Base.Orientation] = 3
    exif.get_ifd(ExifTags.IFD.Exif).update({ExifTags.Base.MakerNote: note, ExifTags.Base.UserComment: remark})
    exif.get_ifd(ExifTags.IFD.GPSInfo).update(
        {ExifTags.GPS.GPSLatitudeRef: "N", ExifTags.GPS.GPSAreaInformation: place}
    )
    return exif


@pytest.mark.parametrize(
    ("what", "format_"),
    [
        ("image-to-image", generation_pb2.IMAGE_FORMAT_PNG),
        ("an edit that keeps nothing", generation_pb2.IMAGE_FORMAT_WEBP),
        ("an edit", generation_pb2.IMAGE_FORMAT_JPEG),
    ],
)
async def test_pictures_have_the_colour_profile_of_their_source_and_nothing_of_its_exif(
    running: Running, what: str, format_: generation_pb2.ImageFormat.ValueType
) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    order = edit(saved(template(), "JPEG", icc_profile=profile, exif=photograph()), saved(box_mask()), format=format_)
    if what == "image-to-image":
        for name in ("mask_image", "keep_unmasked"):
            order.spec.ClearField(name)
    elif what == "an edit that keeps nothing":
        order.spec.keep_unmasked = False
    if what != "an edit":
        order.spec.ClearField("mask_feather")
    data = images(await running.events(order))[0]
    with Image.open(io.BytesIO(data)) as picture:
        assert picture.info.get("icc_profile") == profile
        exif = picture.getexif()
        own = exif.get_ifd(ExifTags.IFD.Exif)
    assert (set(exif), set(own)) in (
        (set(), set()),
        ({ExifTags.IFD.Exif}, {ExifTags.Base.MakerNote, ExifTags.Base.UserComment}),
    ), "the parameters of the request alone"
    assert not [text for text in SECRETS if text in data]
    assert set(read_exif_texts(data)) == (set() if format_ == generation_pb2.IMAGE_FORMAT_PNG else KEYWORDS)


async def test_what_is_done_to_the_source_of_image_to_image_is_said(running: Running) -> None:
    grey = Image.fromarray(np.full((32, 48), 40_000, np.uint16))
    transparent, deep = (edit(saved(image), b"") for image in (cut_out(), grey))
    found = []
    for order in (transparent, deep):
        for name in ("mask_image", "keep_unmasked", "mask_feather"):
            order.spec.ClearField(name)
        found.append((await running.events(order))[-1].completed.provenance.source)
    assert found == [
        generation_pb2.SourceUse(width=64, height=64, transparency_unread=True),
        generation_pb2.SourceUse(width=48, height=32, resized=True, scaled_from_16_bits=True),
    ]


async def test_a_mask_that_redraws_nothing_fails_the_attempt_only(running: Running) -> None:
    events = await running.events(edit(saved(template()), saved(Image.new("L", (64, 64)))))
    assert kinds(events) == ["failed"]
    assert events[0].failed.reason == error_pb2.ERROR_REASON_BAD_IMAGE
    assert kinds(await running.events(request()))[-1] == "completed"
