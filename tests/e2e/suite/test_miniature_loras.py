"""The embedded LoRAs from files to pictures: each form through a real store, against stock."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bottega.client import Client
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES, Scene, Thing, caption
from bottega.quality import oracle
from load import stock_loras
from load.bench.lora_styles import use
from tests.support.stock import assert_same_image, load_stock, pixels_of

_FORMS = {"striped": "Diffusers", "checked": "PEFT", "dusk": "kohya"}
_HEART = Scene(
    things=(Thing(shape="heart", colour="white"), Thing(shape="circle", colour="yellow")),
    ground="purple",
    relation="left of",
)
_SEED = 5
_OPTIONS: dict[str, Any] = {"num_inference_steps": 20, "guidance_scale": 4.0}


@pytest.fixture(scope="module")
def client(client: Client) -> Client:
    """Of the suite, whose store was brought all three."""
    for style in STYLES:
        client.add_lora(style, WEIGHTS / "loras" / style)
    return client


@pytest.fixture(scope="module")
def stock() -> Any:
    pipeline = load_stock()
    for style in STYLES:
        stock_loras.load(pipeline, WEIGHTS / "loras" / style, style)
    return pipeline


def test_every_form_is_in_the_store(client: Client) -> None:
    assert {lora.name: lora.format for lora in client.loras() if lora.name in STYLES} == _FORMS


@pytest.mark.parametrize(
    "scales",
    [pytest.param({"checked": 1.0}, marks=pytest.mark.slow), {"striped": 0.8, "dusk": 1.0}],
    ids=lambda scales: "+".join(scales),
)
def test_a_picture_with_it_is_the_one_that_stock_draws_with_its_file(
    client: Client, stock: Any, scales: dict[str, float]
) -> None:
    drawn = client.generate(caption(_HEART), seed=_SEED, lora=list(scales.items()), **_OPTIONS).pil().convert("RGB")

    use(stock, scales)
    generator = torch.Generator().manual_seed(_SEED)
    (theirs,) = stock(caption(_HEART), generator=generator, **_OPTIONS).images
    assert_same_image(pixels_of(drawn), pixels_of(theirs))
    assert oracle.agrees(oracle.read(drawn), _HEART)
