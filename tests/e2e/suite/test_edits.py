"""Edits through the whole suite: the unmasked pixels stay, and without that it is the picture of stock Diffusers."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from numpy.typing import NDArray

from bottega.client import Box, Client
from bottega.engine.spec import ResolvedSpec
from tests.e2e.conftest import Suite
from tests.samples.edits import ellipse_mask, template
from tests.samples.hostile_images import saved
from tests.support.stock import Stock, assert_same_image
from tests.support.terminal import run

SPEC = ResolvedSpec(
    prompt="a small green circle on a white background",
    num_inference_steps=6,
    guidance_scale=4.0,
    width=64,
    height=64,
    seed=3,
    strength=0.9999,
)
DRAWN: dict[str, Any] = {"seed": SPEC.seed, "num_inference_steps": 6, "guidance_scale": 4.0, "width": 64, "height": 64}
FEATHER = 4


def array(data: bytes) -> NDArray[np.uint8]:
    with PIL.Image.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def test_an_edit_without_keeping_the_unmasked_is_the_picture_of_stock_diffusers(client: Client, stock: Stock) -> None:
    mask = ellipse_mask()
    drawn = client.generate(SPEC.prompt, image=saved(template()), mask_image=saved(mask), keep_unmasked=False, **DRAWN)
    assert drawn.provenance.exact
    assert_same_image(array(drawn.data), stock.edit(SPEC, template(), mask).pixels)


def test_a_picture_is_edited_in_a_box_by_the_sdk_and_the_same_by_the_command(suite: Suite, tmp_path: Path) -> None:
    star, green = tmp_path / "star.png", tmp_path / "green.png"
    picture = suite.client.generate("a big red star on the left on a blue background", **DRAWN)
    picture.save(star)
    box = Box(1, 15, 34, 34)
    words = ("--box", "1,15,34,34", "--feather", FEATHER, "--seed", 3, "--steps", 6, "--guidance-scale", 4)

    edited = suite.client.edit(picture, box, "a big green star", mask_feather=FEATHER, **DRAWN)
    said = run("edit", star, "a big green star", *words, "-o", green, address=suite.gateway.address)

    ours, original = array(edited.data), array(picture.data)
    outside = np.ones(ours.shape[:2], bool)
    outside[box.y - FEATHER : box.y + box.height + FEATHER, : box.x + box.width + FEATHER] = False
    assert np.array_equal(ours[outside], original[outside])
    assert (ours[~outside] != original[~outside]).any()
    assert (edited.provenance.exact, edited.provenance.image_digest) == (True, picture.digest)
    assert edited.provenance.mask.share == pytest.approx(34 * 34 / 64**2)
    assert (said.exit_code, "mask: it covers 28.2 % of what was drawn" in said.stdout) == (0, True), said.output
    assert np.array_equal(array(green.read_bytes()), ours)
