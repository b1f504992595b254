"""Folders in the layouts in which people publish SDXL pass the checker, and their pictures are stock Diffusers'."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model_files.folder_check import check_model_folder
from tests.samples.published import PLAIN, Layout, published_model
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import Pixels, assert_same_image, load_stock, pixels_of, said

_FP16 = Layout(variants=("fp16",))
_SPEC = ResolvedSpec(prompt="a big red star", num_inference_steps=4, width=64, height=64, seed=3)


@pytest.mark.parametrize(
    ("layout", "variant", "shards"),
    [
        pytest.param(PLAIN, "", 1, id="plain"),
        pytest.param(Layout(variants=("", "fp16")), "", 1, id="both, of which plain ones are taken"),
        pytest.param(_FP16, "fp16", 1, id="fp16"),
        pytest.param(Layout(shards=3), "", 3, id="shards"),
        pytest.param(Layout(variants=("fp16",), shards=2), "fp16", 2, id="shards of fp16"),
        pytest.param(
            Layout(variants=("fp16",), shards=2, legacy_shard_names=True), "fp16", 2, id="old names of shards of fp16"
        ),
        pytest.param(Layout(old_vae_names=True), "", 1, id="old names in the VAE"),
        pytest.param(Layout(position_ids=False, text_prefix=False), "", 1, id="names of today's transformers"),
    ],
)
def test_a_published_layout_passes(layout: Layout, variant: str, shards: int) -> None:
    folder = published_model(layout)
    report = check_model_folder(folder)
    assert report.problems == ()
    assert (report.variant, len(report.parts["unet"].files)) == (variant, shards)


@pytest.fixture(scope="module")
def references() -> Mapping[str, Pixels]:
    """What stock draws from float32 and from fp16 weights, by variant."""
    both = published_model(Layout(variants=("", "fp16"), shards=2))
    return {name: _stock_pixels(load_stock(both, variant=name or None)) for name in ("", "fp16")}


# That every layout has stock's weights is shown by test_weights.py.
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(Layout(variants=("fp16",), shards=3, legacy_shard_names=True), id="old names of shards of fp16"),
    ],
)
def test_a_published_layout_is_drawn_from_as_by_stock(layout: Layout, references: Mapping[str, Pixels]) -> None:
    drawing = ManualEngine(make_engine(load(published_model(layout)), EngineLimits())).draw(
        EngineOrder(key="picture", spec=_SPEC)
    )
    assert_same_image(drawing.pixels[0], references[layout.variants[0]])


def _stock_pixels(pipeline: Any) -> Pixels:
    size = {"width": _SPEC.width, "height": _SPEC.height}
    generator = torch.Generator("cpu").manual_seed(_SPEC.seed)
    return pixels_of(pipeline(**said(_SPEC), **size, generator=generator).images[0])


def test_where_one_part_has_only_fp16_weights_every_part_that_has_them_takes_them(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    shutil.copytree(published_model(Layout(variants=("", "fp16"))), folder)
    (folder / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    (folder / "vae" / "diffusion_pytorch_model.fp16.safetensors").unlink()
    report = check_model_folder(folder)
    assert {name: part.variant for name, part in report.parts.items() if part.files} == {
        "text_encoder": "fp16",
        "text_encoder_2": "fp16",
        "unet": "fp16",
        "vae": "",
    }
