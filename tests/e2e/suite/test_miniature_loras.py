"""The embedded LoRAs from files to pictures: each form through a real store, against stock, and never mixed up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import PIL.Image
import pytest
import torch

from bottega.client import Client, Picture
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES, Scene, Thing, caption
from bottega.quality import oracle
from load import stock_loras
from load.bench.lora_styles import PLAIN, layout_of, look, use
from load.miniature.quality import Clip, load_miniature
from tests.support.stock import assert_same_image, load_stock, pixels_of

# Whether two requests share their turns is the scheduler's choice, by what turns took of late on a busy machine.
_TRIES = 12
_FORMS = {"striped": "Diffusers", "checked": "PEFT", "dusk": "kohya"}
_HEART = Scene(
    things=(Thing(shape="heart", colour="white"), Thing(shape="circle", colour="yellow")),
    ground="purple",
    relation="left of",
)
_SQUARE = Scene(things=(Thing(shape="square", colour="red"),), ground="blue", size="big", place="left")
_SEEDS = {_HEART: 5, _SQUARE: 2}
# The first is the longer one: then sharing turns pays also where the engine has learned, of a busy machine, that such
# turns take twice as long.
_STEPS = {_HEART: 32, _SQUARE: 16}
_GUIDANCE = 4.0


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


@pytest.fixture(scope="module")
def clip() -> Clip:
    return load_miniature()


def _options(scene: Scene, scales: Mapping[str, float]) -> dict[str, Any]:
    lora = list(scales.items())
    return {"num_inference_steps": _STEPS[scene], "guidance_scale": _GUIDANCE, "seed": _SEEDS[scene], "lora": lora}


@pytest.fixture(scope="module")
def draw(client: Client) -> Callable[..., Picture]:
    """Draws a scene with LoRAs of these scales while nothing else is drawn, each once."""

    @cache
    def drawn(scene: Scene, **scales: float) -> Picture:
        return client.generate(caption(scene), **_options(scene, scales))

    return drawn


def _rgb(picture: Picture) -> PIL.Image.Image:
    return picture.pil().convert("RGB")


def test_every_form_is_in_the_store(client: Client) -> None:
    assert {lora.name: lora.format for lora in client.loras() if lora.name in STYLES} == _FORMS


@pytest.mark.parametrize(
    "scales",
    [pytest.param({"checked": 1.0}, marks=pytest.mark.slow), {"striped": 0.8, "dusk": 1.0}],
    ids=lambda scales: "+".join(scales),
)
def test_a_picture_with_it_is_the_one_that_stock_draws_with_its_file(
    draw: Callable[..., Picture], stock: Any, scales: dict[str, float]
) -> None:
    drawn = draw(_HEART, **scales)

    use(stock, scales)
    generator = torch.Generator().manual_seed(_SEEDS[_HEART])
    (theirs,) = stock(
        caption(_HEART), generator=generator, num_inference_steps=_STEPS[_HEART], guidance_scale=_GUIDANCE
    ).images
    assert_same_image(pixels_of(_rgb(drawn)), pixels_of(theirs))
    assert oracle.agrees(oracle.read(_rgb(drawn)), _HEART)


@pytest.mark.slow  # test_whole_card.py compares pictures with several sets of LoRAs beside each other
@pytest.mark.parametrize(("one", "other"), [("checked", "dusk"), ("striped", PLAIN)])
def test_two_clients_at_once_get_each_its_own_scene_in_its_own_style(
    client: Client, draw: Callable[..., Picture], stock: Any, clip: Clip, one: str, other: str
) -> None:
    wanted = {one: _HEART, other: _SQUARE}
    scales = {style: {} if style == PLAIN else {style: 1.0} for style in wanted}
    alone = {style: draw(scene, **scales[style]) for style, scene in wanted.items()}
    plain = {scene: _rgb(draw(scene)) for scene in wanted.values()}
    for _ in range(_TRIES):
        together = _together(client, {style: (scene, scales[style]) for style, scene in wanted.items()})
        for style, picture in together.items():
            scene = wanted[style]
            assert picture.pil().tobytes() == alone[style].pil().tobytes()
            assert oracle.agrees(oracle.read(_rgb(picture)), scene)
            layout = layout_of(_rgb(picture), plain[scene], scene.ground)
            assert look(clip, stock, [_rgb(picture)], [layout]) == [style]
        if all(picture.provenance.mean_group_requests > 1.2 for picture in together.values()):
            return
    pytest.fail("they were drawn one after the other")


def _together(client: Client, wanted: Mapping[str, tuple[Scene, Mapping[str, float]]]) -> dict[str, Picture]:
    """A picture of each, with its LoRAs, by clients of their own at once."""
    with Client(client.address) as first, Client(client.address) as second:
        jobs = [
            each.submit(caption(scene), **_options(scene, scales))
            for each, (scene, scales) in zip((first, second), wanted.values(), strict=True)
        ]
        return {style: job.result()[0] for style, job in zip(wanted, jobs, strict=True)}
