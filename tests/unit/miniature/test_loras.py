"""The embedded LoRAs load into stock Diffusers, change how a picture looks, and keep what it shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import PIL.Image
import pytest
import torch

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES, Scene, Thing, caption
from load import stock_loras
from load.miniature import oracle
from load.miniature.quality import ssim
from tests.support.stock import load_stock
from tests.support.torch_threads import torch_threads

LORAS = WEIGHTS / "loras"
SCENE = Scene(things=(Thing(shape="square", colour="orange"),), ground="cyan", size="big", place="left")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As quick for one picture, and it leaves the other cores to other tests."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def pipeline() -> Any:
    return load_stock()


@pytest.fixture(scope="module")
def plain(pipeline: Any) -> PIL.Image.Image:
    return draw(pipeline)


def draw(pipeline: Any) -> PIL.Image.Image:
    (picture,) = pipeline(
        caption(SCENE), num_inference_steps=12, guidance_scale=4.0, generator=torch.Generator().manual_seed(1)
    ).images
    assert isinstance(picture, PIL.Image.Image)
    return picture


@pytest.mark.parametrize("style", STYLES)
def test_a_lora_changes_the_picture_and_keeps_the_scene(style: str, plain: PIL.Image.Image, pipeline: Any) -> None:
    stock_loras.load(pipeline, LORAS / style, style)
    picture = draw(pipeline)
    pipeline.unload_lora_weights()

    assert oracle.agrees(oracle.read(plain), SCENE)
    assert oracle.agrees(oracle.read(picture), SCENE)
    assert ssim(picture, plain) < 0.95


def test_each_of_the_three_forms_is_there_and_all_are_small() -> None:
    files = {file.name for file in LORAS.rglob("*") if file.is_file()}

    assert files == {
        "pytorch_lora_weights.safetensors",
        "adapter_config.json",
        "adapter_model.safetensors",
        "dusk.safetensors",
    }
    assert sum(file.stat().st_size for file in LORAS.rglob("*") if file.is_file()) < 5e6
