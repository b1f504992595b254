"""Folders in the layouts in which people publish SDXL pass the checker, which says what is loaded of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bottega.model_files import check_model_folder
from tests.samples.published import PLAIN, Layout, published_model

_FP16 = Layout(variants=("fp16",))


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
