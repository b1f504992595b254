"""Masks are read as Diffusers' inpainting pipelines read them; one that redraws nothing is refused in our own words."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image
from numpy.typing import NDArray
from PIL import Image

from bottega.addons.edits.engine.masked.tokens import dilate
from bottega.addons.edits.engine.masked.tokens import share as engine_share
from bottega.codec import ImageSize, MaskOrder, edits
from bottega.errors import BadImage
from tests.samples.edits import box_mask
from tests.samples.hostile_images import saved

DIFFUSERS = VaeImageProcessor(
    vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True
)  # as the inpainting pipelines make it


def blobs(width: int = 96, height: int = 80, *, seed: int = 3) -> Image.Image:
    """A grey mask with soft edges, black at its border."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6), dtype=np.uint8)
    mask = Image.new("L", (width, height))
    mask.paste(Image.fromarray(noise).resize((width // 2, height // 2), Image.Resampling.BICUBIC), (20, 12))
    return mask


def clean(mask: Image.Image) -> Image.Image:
    """Black and white: as the edit reads it, and as Diffusers takes the part of the image from it."""
    return mask.convert("L").point([0] * 128 + [255] * 128)


def order(width: int = 64, height: int = 64, **said: Any) -> MaskOrder:
    return MaskOrder(width=width, height=height, latent_scale=8, **said)


def as_array(drawn: edits.DrawnMask, width: int = 64, height: int = 64) -> NDArray[np.uint8]:
    return np.frombuffer(drawn.pixels, np.uint8).reshape(height, width)


def as_diffusers(mask: Image.Image, width: int, height: int, padding: int | None = None) -> NDArray[np.uint8]:
    box = None if padding is None else DIFFUSERS.get_crop_region(clean(mask), width, height, pad=padding)
    mode = "default" if padding is None else "fill"
    tensor = DIFFUSERS.preprocess(mask, height=height, width=width, resize_mode=mode, crops_coords=box)
    pixels: NDArray[np.uint8] = tensor[0, 0].numpy().astype(np.uint8)
    return pixels


@pytest.mark.parametrize("size", [(96, 80), (64, 64), (128, 40)])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P", "1"])
def test_a_mask_is_resized_and_binarized_as_diffusers_does(mode: str, size: tuple[int, int]) -> None:
    mask = blobs().convert(mode)

    drawn = edits.draw(saved(mask), order(*size))

    expected = as_diffusers(load_image(mask), *size)
    assert np.array_equal(as_array(drawn, *size), expected)
    assert drawn.use.share == pytest.approx(expected.mean())
    assert (drawn.use.width, drawn.use.height) == (96, 80)
    assert drawn.use.resized == (size != (96, 80))
    assert drawn.use.converted == (mode not in {"1", "L"})


@pytest.mark.parametrize("padding", [0, 7, 32, 4096])
@pytest.mark.parametrize("size", [(64, 64), (96, 48), (40, 72)])
@pytest.mark.parametrize("mask", [blobs(), clean(blobs()), clean(blobs(seed=4))], ids=["grey", "clean", "another"])
def test_the_part_around_what_is_redrawn_is_cut_out_as_diffusers_does(
    size: tuple[int, int], padding: int, mask: Image.Image
) -> None:

    drawn = edits.draw(saved(mask), order(*size, padding=padding, image_size=ImageSize(width=96, height=80)))

    box = DIFFUSERS.get_crop_region(clean(mask), *size, pad=padding)
    assert drawn.crop == box
    assert np.array_equal(as_array(drawn, *size), as_diffusers(mask, *size, padding))
    use = drawn.use
    assert (use.crop_x, use.crop_y, use.crop_x + use.crop_width, use.crop_y + use.crop_height) == box
    assert not use.resized


def test_a_mask_of_another_size_than_the_image_is_resized_to_it_before_it_is_cut() -> None:
    image = ImageSize(width=192, height=160)

    drawn = edits.draw(saved(blobs()), order(padding=4, image_size=image))

    fitted = load_image(blobs()).resize((192, 160), Image.Resampling.LANCZOS)
    assert drawn.crop == DIFFUSERS.get_crop_region(clean(fitted), 64, 64, pad=4)
    assert drawn.use.resized
    assert (drawn.use.width, drawn.use.height) == (96, 80), "its own size is told"


def test_a_background_that_is_not_quite_black_does_not_count() -> None:
    mask = box_mask((30, 20, 50, 40), 96, 80).point(lambda level: max(level, 1))
    drawn = edits.draw(saved(mask), order(padding=4, image_size=ImageSize(width=96, height=80)))
    assert drawn.crop == (26, 16, 54, 44)


def test_the_ringing_of_a_resize_does_not_count() -> None:
    small = box_mask((16, 10, 24, 18), 51, 29)
    drawn = edits.draw(saved(small), order(padding=8, image_size=ImageSize(width=203, height=117)))
    use = drawn.use
    assert (use.crop_x, use.crop_y, use.crop_width, use.crop_height) == (56, 32, 49, 49)
    ringing = small.resize((203, 117), Image.Resampling.LANCZOS).point(lambda level: 255 if level else 0)
    assert drawn.crop != DIFFUSERS.get_crop_region(ringing, 64, 64, pad=8), "Diffusers would count it"


def test_transparency_is_read_where_it_is_asked_for() -> None:
    image = Image.new("RGBA", (64, 64), (255, 255, 255, 255))
    image.paste((255, 255, 255, 0), (8, 16, 40, 32))

    drawn = as_array(edits.draw(saved(image), order(alpha=True)))

    assert drawn[16:32, 8:40].all()
    assert drawn.sum() == 16 * 32


@pytest.mark.parametrize(("opacity", "unread"), [(0, True), (127, True), (128, False), (255, False)])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_that_is_not_read_is_said(mode: str, opacity: int, unread: bool) -> None:
    image = Image.new("RGBA", (64, 64), "white")
    image.paste((255, 255, 255, opacity), (8, 16, 40, 32))
    mask = saved(image.convert(mode))
    assert edits.inspect(mask, order()).transparency_unread == unread
    assert edits.inspect(mask, order()).share == 1
    if unread:
        assert not edits.inspect(mask, order(alpha=True)).transparency_unread


@pytest.mark.parametrize(
    ("mode", "black", "white"),
    [("P", 0, 1), ("1", 0, 255), ("L", 0, 255), ("RGB", (0, 0, 0), (255, 255, 255))],
)
def test_transparency_of_one_colour_that_is_not_read_is_said(mode: str, black: Any, white: Any) -> None:
    image = Image.new(mode, (64, 64), white)
    if mode == "P":
        image.putpalette([0, 0, 0, 255, 255, 255])
    image.paste(black, (8, 16, 40, 32))
    file = io.BytesIO()
    image.save(file, "PNG", transparency=black)
    use, opaque = edits.inspect(file.getvalue(), order()), edits.inspect(saved(image), order())
    assert use.transparency_unread
    assert not opaque.transparency_unread
    assert (use.share, use.converted) == (opaque.share, opaque.converted)
    assert edits.inspect(file.getvalue(), order(alpha=True)).share == 32 * 16 / 64**2


def test_of_a_mask_without_white_it_is_said_that_its_transparency_was_not_read() -> None:
    """As other programs make masks: black, and transparent where they redraw."""
    image = Image.new("RGBA", (64, 64), "black")
    image.paste((0, 0, 0, 0), (8, 16, 40, 32))
    with pytest.raises(BadImage, match=r"no part of it is white .*; mask_alpha redraws what is transparent in it"):
        edits.inspect(saved(image), order())
    with pytest.raises(BadImage, match=r"at 64x64$"):
        edits.inspect(saved(Image.new("RGBA", (64, 64), "black")), order())


@pytest.mark.parametrize(("level", "is_white"), [(127, False), (128, True)])
def test_half_is_white(level: int, is_white: bool) -> None:
    mask = saved(Image.new("L", (64, 64), level))
    if is_white:
        assert edits.inspect(mask, order()).share == 1
    else:
        with pytest.raises(BadImage, match="no part of it is white"):
            edits.inspect(mask, order())


@pytest.mark.parametrize(
    ("mask", "said", "text"),
    [
        (Image.new("L", (64, 64)), {}, r"no part of it is white \(\.5 and above\) at 64x64"),
        (Image.new("RGB", (64, 64), (255, 255, 255)), {"alpha": True}, "no part of it is transparent"),
        (
            Image.new("L", (96, 80)),
            {"padding": 8, "image_size": ImageSize(width=96, height=80)},
            "no part of it is white",
        ),
    ],
    ids=["black", "opaque", "black and cut"],
)
def test_a_mask_that_redraws_nothing_is_refused(mask: Image.Image, said: dict[str, Any], text: str) -> None:
    with pytest.raises(BadImage, match=text):
        edits.inspect(saved(mask), order(**said))


def test_a_mask_of_which_the_latent_has_nothing_is_refused() -> None:
    """Latents are taken by nearest interpolation: what lies between the pixels that it takes is not there."""
    mask = Image.new("L", (64, 64))
    mask.paste(255, (9, 9, 16, 16))
    assert not torch.nn.functional.interpolate(torch.from_numpy(np.array(mask))[None, None] / 255, size=(8, 8)).any()

    with pytest.raises(BadImage, match="nothing is left of it in the latent, of which an element is 8x8 pixels"):
        edits.inspect(saved(mask), order())
    mask.paste(255, (16, 16, 17, 17))
    assert torch.nn.functional.interpolate(torch.from_numpy(np.array(mask))[None, None] / 255, size=(8, 8)).any()
    assert edits.inspect(saved(mask), order()).share


def test_a_part_that_is_too_narrow_to_be_drawn_is_refused() -> None:
    line = Image.new("L", (2000, 1), 255)

    with pytest.raises(BadImage, match="the part to be drawn is 2000x1 pixels: too narrow for 64x64"):
        edits.inspect(saved(line), order(padding=0, image_size=ImageSize(width=2000, height=1)))


@pytest.mark.parametrize("size", [(64, 64), (96, 80), (72, 104), (8, 24)])
@pytest.mark.parametrize(("token", "margin"), [(1, 0), (1, 2), (2, 1), (4, 1), (4, 3)])
def test_the_share_that_is_computed_is_that_of_the_engine(size: tuple[int, int], token: int, margin: int) -> None:
    mask = Image.new("L", size)
    for x, y in ((0, 0), (size[0] // 2 // 8 * 8, size[1] - 8)):
        mask.paste(255, (x, y, x + 8, y + 8))
    drawn = edits.draw(saved(mask), order(*size, token=token, margin=margin))
    latent = torch.from_numpy(as_array(drawn, *size)[::8, ::8].copy()) > 0
    assert drawn.use.computed_share == pytest.approx(engine_share(dilate(latent, margin, token), token))
    assert edits.inspect(saved(mask), order(*size)).computed_share == 0.0, "where nobody says how masks become tokens"
