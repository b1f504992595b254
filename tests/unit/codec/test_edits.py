"""What is drawn of an edit's image is what Diffusers draws of it, and what was drawn is put back as it should be."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diffusers.image_processor import VaeImageProcessor
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageDraw, ImageFilter

from bottega.codec import Crop, ImageSize, MaskOrder, Overlay, edits
from bottega.codec.images import encode_image
from bottega.v1.generation_pb2 import IMAGE_FORMAT_JPEG, IMAGE_FORMAT_PNG, IMAGE_FORMAT_WEBP, ImageFormat
from tests.samples.edits import box_mask, ellipse_mask, template
from tests.samples.hostile_images import saved

# As StableDiffusionXLInpaintPipeline has them, of a VAE of eight pixels.
IMAGES = VaeImageProcessor(vae_scale_factor=8)
MASKS = VaeImageProcessor(vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True)
CONTROLS = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)


def soft(mask: Image.Image) -> Image.Image:
    return mask.filter(ImageFilter.GaussianBlur(3))


def coloured(mask: Image.Image) -> Image.Image:
    """Of several channels, between black and a light colour."""
    return Image.merge("RGB", (mask, mask.point(lambda value: value * 3 // 4), mask.point(lambda value: value // 2)))


def redrawn(mask: Image.Image) -> Image.Image:
    """What is white of it: what Diffusers' part of the image is taken from where a mask has no grey."""
    return mask.convert("L").point([0] * 128 + [255] * 128)


def corner(width: int, height: int) -> Image.Image:
    """Grey: white at the right edge and at the lowest one."""
    mask = Image.new("L", (width, height))
    mask.paste(255, (width - 9, height - 20, width, height))
    return mask


# Image, mask of its size, size at which it is drawn, padding.
CASES: dict[str, tuple[Image.Image, Image.Image, tuple[int, int], int | None]] = {
    "as it is": (template(), box_mask(), (64, 64), None),
    "larger": (template(50, 70), soft(box_mask((9, 20, 40, 52), 50, 70)), (96, 64), None),
    "smaller": (template(200, 150), coloured(ellipse_mask((20, 30, 150, 110), 200, 150)), (64, 64), None),
    "cut": (template(160, 120), box_mask((70, 30, 95, 55), 160, 120), (64, 64), 8),
    "cut without padding": (template(160, 120), soft(ellipse_mask((60, 30, 95, 80), 160, 120)), (64, 96), 0),
    "cut at an edge": (template(200, 90), corner(200, 90), (96, 64), 5),
    "cut high": (template(60, 200), box_mask((3, 10, 12, 190), 60, 200), (96, 64), 4),
    "cut to all of it": (template(80, 64), box_mask((3, 10, 70, 50), 80, 64), (64, 64), 4000),
}


@pytest.mark.parametrize("name", CASES)
def test_an_edit_is_cut_and_resized_as_in_diffusers(name: str) -> None:
    image, mask, (width, height), padding = CASES[name]
    crop, mode = None, "default"
    if padding is not None:
        crop, mode = MASKS.get_crop_region(redrawn(mask), width, height, pad=padding), "fill"
    order = MaskOrder(width=width, height=height, latent_scale=8, padding=padding)
    ours = edits.decode(saved(image), saved(mask), order)
    options = {"height": height, "width": width, "resize_mode": mode, "crops_coords": crop}
    theirs = VaeImageProcessor(vae_scale_factor=8, do_normalize=False).preprocess(image, **options)
    assert (array(ours.pixels.data, height, width) == bytes_of(theirs)).all()
    drawn_mask = np.frombuffer(ours.mask, np.uint8).reshape(height, width)
    assert (drawn_mask == MASKS.preprocess(mask, **options).numpy()).all()
    assert ours.facts.size == ImageSize(width=image.width, height=image.height)
    if crop is None:
        assert ours.crop is None
    else:
        x, y, right, bottom = crop
        assert ours.crop == Crop(x=x, y=y, width=right - x, height=bottom - y, image_size=ours.facts.size)
        control = CONTROLS.preprocess(image.rotate(180), **options)
        part = edits.decode_part(saved(image.rotate(180)), width, height, ours.crop)
        assert (array(part.pixels.data, height, width) == bytes_of(control)).all()


@pytest.mark.parametrize("name", [name for name, (*_, padding) in CASES.items() if padding is not None])
def test_without_keeping_the_unmasked_a_cut_edit_is_put_back_as_in_diffusers(name: str) -> None:
    image, mask, (width, height), padding = CASES[name]
    order = MaskOrder(width=width, height=height, latent_scale=8, padding=padding)
    drawn = template(width, height).rotate(90)
    crop = MASKS.get_crop_region(redrawn(mask), width, height, pad=padding)
    ours = edits.composed(drawn, overlay(image, mask, order, keep_unmasked=False))
    theirs = IMAGES.apply_overlay(mask, image, drawn, crop)
    assert (np.asarray(ours) == np.asarray(theirs)).all()


@pytest.mark.parametrize("name", [name for name, (*_, padding) in CASES.items() if padding is not None])
def test_a_cut_edit_is_put_back_alike_where_what_covers_the_crop_would_be_too_large(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is seen of it is made then."""
    image, mask, (width, height), padding = CASES[name]
    order = MaskOrder(width=width, height=height, latent_scale=8, padding=padding)
    put_back = overlay(image, mask, order, keep_unmasked=False)
    drawn = template(width, height).rotate(90)
    whole = np.asarray(edits.composed(drawn, put_back)).astype(int)
    monkeypatch.setattr("bottega.codec.edits.MAX_IMAGE_PIXELS", 0)
    seen = np.asarray(edits.composed(drawn, put_back)).astype(int)
    assert np.abs(seen - whole).max() <= 1


@pytest.mark.parametrize("feather", [0, 5, 8])
@pytest.mark.parametrize("name", CASES)
def test_outside_mask_and_feather_every_byte_is_the_images_own_and_inside_the_mask_the_drawn_one(
    name: str, feather: int
) -> None:
    image, mask, (width, height), padding = CASES[name]
    order = MaskOrder(width=width, height=height, latent_scale=8, padding=padding)
    black = Image.new("RGB", (width, height))
    ours = np.asarray(edits.composed(black, overlay(image, mask, order, feather=feather)))
    kept = image if padding is not None else image.resize((width, height), Image.Resampling.LANCZOS)
    inside = np.asarray(mask.resize(kept.size, Image.Resampling.LANCZOS).convert("L")) >= 128
    away = distances(inside)
    assert ours.shape == (kept.height, kept.width, 3)
    assert (ours[away > feather] == np.asarray(kept)[away > feather]).all()
    assert (ours[inside] == 0).all()
    assert (away <= feather).any()


@pytest.mark.parametrize(("padding", "reach"), [(4, 4), (30, 16)])
def test_within_a_part_of_the_image_the_fade_ends_where_that_does(padding: int, reach: int) -> None:
    """A step of more than the fade's own is a seam."""
    mask, image = box_mask((40, 40, 72, 72), 112, 112), Image.new("RGB", (112, 112), "white")
    order = MaskOrder(width=64, height=64, latent_scale=4, padding=padding)
    black = Image.new("RGB", (64, 64))
    line = np.asarray(edits.composed(black, overlay(image, mask, order, feather=16)))[56, :, 0].astype(int)
    assert np.abs(np.diff(line)).max() <= 255 / reach + 1
    assert (line[: 40 - reach] == 255).all()


def test_around_the_mask_the_drawn_pixels_fade_in_a_straight_line() -> None:
    mask = Image.new("L", (60, 60))
    ImageDraw.Draw(mask).rectangle((20, 20, 39, 39), fill=255)
    for feather in (1, 5, 8, 15):
        weights = np.asarray(edits.feathered(mask, feather)).astype(float) / 255
        for line in (weights[30, 39:], weights[30, 20::-1], weights[39:, 30], weights[20::-1, 30]):
            expected = np.maximum(0.0, 1 - np.arange(len(line)) / feather)
            assert np.abs(line - expected).max() < 0.02


@pytest.mark.parametrize("feather", [3, 8, 31])
def test_a_corner_fades_nearly_as_fast_as_an_edge(feather: int) -> None:
    mask = Image.new("L", (120, 120))
    mask.putpixel((60, 60), 255)
    weights = np.asarray(edits.feathered(mask, feather)).astype(float) / 255
    away = distances(np.asarray(mask) > 0)
    assert (weights[away > feather] == 0).all()
    assert weights[60, 60] == 1
    assert (weights <= np.maximum(0.0, 1 - away / feather) + 1e-6).all()
    assert (weights >= np.maximum(0.0, 1 - 1.09 * away / feather) - 0.04).all()


def cut_out(width: int = 64, height: int = 64) -> Image.Image:
    """A picture that is transparent at its left, half so in its middle, and black where nobody sees it."""
    image = template(width, height).convert("RGBA")
    alpha = Image.new("L", image.size, 255)
    alpha.paste(0, (0, 0, width // 3, height))
    alpha.paste(100, (width // 3, 0, width // 2, height))
    image.putalpha(alpha)
    image.paste((0, 0, 0, 0), (0, 0, width // 3, height))
    return image


@pytest.mark.parametrize("padding", [None, 8])
@pytest.mark.parametrize("format_", [IMAGE_FORMAT_PNG, IMAGE_FORMAT_WEBP])
def test_the_transparency_of_an_image_stays_outside_the_mask_and_what_is_redrawn_is_opaque(
    format_: ImageFormat.ValueType, padding: int | None
) -> None:
    image, mask = cut_out(), box_mask((12, 20, 40, 52))
    order = MaskOrder(width=64, height=64, latent_scale=8, padding=padding)
    made = edits.composed(Image.new("RGB", (64, 64), "red"), overlay(image, mask, order, feather=6))
    with Image.open(io.BytesIO(encode_image(made, format_, 100, {}))) as read:
        ours, own = np.asarray(read), np.asarray(image)
    inside = np.asarray(mask) > 0
    away = distances(inside)
    assert (ours[away > 6] == own[away > 6]).all()
    assert (ours[inside] == (255, 0, 0, 255)).all()
    # At the left nothing but the drawn colour is seen, ever less of it.
    rim = ours[36, 6:12]
    assert (rim[:, 0] >= 250)[rim[:, 3] > 0].all()
    assert (np.diff(rim[:, 3].astype(int)) > 0).all()


def test_a_drawn_colour_that_is_off_by_one_is_off_by_one_at_most_however_little_of_it_is_seen() -> None:
    put_into = overlay(cut_out(), box_mask(), MaskOrder(width=64, height=64, latent_scale=8), feather=16)
    one, other = (
        np.asarray(edits.composed(Image.new("RGB", (64, 64), colour), put_into))
        for colour in ((97, 14, 201), (98, 15, 202))
    )
    assert np.abs(one.astype(int) - other.astype(int)).max() == 1
    seen = one[:, :12][one[:, :12, 3] > 0]
    assert (seen[:, :3] == (97, 14, 201)).all(), "nothing else is seen where the image is transparent"
    assert seen[:, 3].min() < 20


def test_an_edit_has_transparency_only_where_something_of_its_image_is_transparent_and_kept() -> None:
    order = MaskOrder(width=64, height=64, latent_scale=8, padding=8)
    for image, mask, options, mode in (
        (cut_out(), box_mask(), {}, "RGBA"),
        (template().convert("RGBA"), box_mask(), {"feather": 4}, "RGB"),
        (cut_out(), box_mask((0, 0, 32, 64)), {}, "RGB"),
        (cut_out(), box_mask(), {"keep_unmasked": False}, "RGB"),
    ):
        made = edits.composed(Image.new("RGB", (64, 64), "red"), overlay(image, mask, order, **options))
        assert made.mode == mode
        with Image.open(io.BytesIO(encode_image(made, IMAGE_FORMAT_JPEG, 90, {}))) as read:
            assert read.mode == "RGB"


def overlay(image: Image.Image, mask: Image.Image, order: MaskOrder, **options: Any) -> Overlay:
    return Overlay(image=saved(image), mask=saved(mask), order=order, **options)


def distances(inside: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Of every pixel to the nearest one inside, in pixels."""
    rows, columns = np.indices(inside.shape)
    nearest = np.full(inside.shape, np.inf)
    for top, left in _edge(inside):
        nearest = np.minimum(nearest, (rows - top) ** 2 + (columns - left) ** 2)
    return np.sqrt(np.where(inside, 0, nearest))


def _edge(inside: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The pixels inside that have a neighbour outside, or are at the border: one of them is always the nearest."""
    padded = np.pad(inside, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return [(int(y), int(x)) for y, x in zip(*np.nonzero(inside & ~inner), strict=True)]


def array(data: bytes, height: int, width: int) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(height, width, 3)


def bytes_of(tensor: object) -> NDArray[np.uint8]:
    """uint8 [height, width, 3] of Diffusers' [1, 3, height, width] in 0 to 1."""
    values: NDArray[np.float32] = tensor[0].permute(1, 2, 0).numpy()  # type: ignore[index]
    return (values * 255).round().astype(np.uint8)


@pytest.mark.parametrize("keep_unmasked", [True, False])
@pytest.mark.parametrize(("mode", "kept"), [("RGB", True), ("RGBA", True), ("L", False), ("CMYK", False)])
def test_the_colour_profile_of_an_image_goes_with_its_edit(mode: str, kept: bool, keep_unmasked: bool) -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    file = io.BytesIO()
    template().convert(mode).save(file, "JPEG" if mode == "CMYK" else "PNG", icc_profile=profile)
    order = MaskOrder(width=64, height=64, latent_scale=8)
    given = replace(overlay(template(), box_mask(), order, keep_unmasked=keep_unmasked), image=file.getvalue())
    made = edits.composed(template().rotate(90), given)
    for format_, quality in ((IMAGE_FORMAT_PNG, 0), (IMAGE_FORMAT_JPEG, 90), (IMAGE_FORMAT_WEBP, 90)):
        with Image.open(io.BytesIO(encode_image(made, format_, quality, {}))) as read:
            assert read.info.get("icc_profile") == (profile if kept else None)
