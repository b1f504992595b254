"""LoRAs against stock Diffusers with PEFT: beside the weights and inside them, late, in mixed groups, and resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.engine.engine import Engine
from bottega.engine.events import JobCheckpointed, JobDecided
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import control_image, control_spec, random_controlnet, save, shelf_of
from tests.samples.engine_loras import Components, LorasByHand, lora_spec, styled_latent, styled_stock
from tests.samples.small_model import SIZE, small_model
from tests.support.addon_messages import loras_at
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import assert_close, latent_of, load_stock

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=5, width=SIZE, height=SIZE, seed=15
)
ONE = {"outline": 0.8}
THREE = {"outline": 0.5, "pastel": 1.1, "pixel": 0.3}


@pytest.fixture(scope="module")
def styled() -> tuple[Any, dict[str, Components]]:
    return styled_stock(small_model())


@pytest.fixture(scope="module")
def stock(styled: tuple[Any, dict[str, Components]]) -> Any:
    return styled[0]


@pytest.fixture(scope="module")
def plain_latent() -> Tensor:
    """What stock makes of SPEC without PEFT."""
    return latent_of(load_stock(small_model()), SPEC)


@pytest.fixture
def loras(styled: tuple[Any, dict[str, Components]]) -> LorasByHand:
    return LorasByHand.of(styled[1])


def styled_order(
    scales: Mapping[str, float], spec: ResolvedSpec = SPEC, key: str = "styled", **options: Any
) -> EngineOrder:
    return EngineOrder(key=key, spec=replace(spec, loras=tuple(lora_spec(*each, **options) for each in scales.items())))


Easels = Callable[..., ManualEngine]


@pytest.fixture
def easels(model: Model, loras: LorasByHand) -> Iterator[Easels]:
    """Makes engines that always patch, never do, or choose; one at a time, because they share the model."""
    engines: list[Engine] = []

    def make(patches: bool | None = None, limits: EngineLimits = TOGETHER, **options: Any) -> ManualEngine:
        for engine in engines:
            lora_weights(engine).restore()
        engines.append(make_engine(model, limits, loras=loras, **options))
        if patches is not None:
            lora_weights(engines[-1]).costs = FixedCosts(pays=patches)
        return ManualEngine(engines[-1])

    yield make
    for engine in engines:
        lora_weights(engine).restore()


@pytest.mark.parametrize(
    ("scales", "patches"), [(ONE, False), (THREE, False), (THREE, True)], ids=["one", "three", "three inside"]
)
def test_a_set_of_loras_draws_what_stock_with_peft_draws(
    easels: Easels, stock: Any, plain_latent: Tensor, scales: dict[str, float], patches: bool
) -> None:
    easel = easels(patches=patches)
    drawing = easel.draw(styled_order(scales))
    theirs = styled_latent(stock, SPEC, scales)
    assert_close(drawing.latents[0], theirs)
    assert (theirs - plain_latent).abs().max() > 0.05  # the LoRAs matter
    assert (lora_weights(easel.engine).patched is not None) == patches
    assert [(each.name, each.scale, each.from_step) for each in drawing.record.provenance.loras] == [
        (name, scale, 0) for name, scale in scales.items()
    ]
    assert {each.name for each in drawing.record.provenance.loras if each.mixed_alphas} == scales.keys() & {"pastel"}
    plain = easel.draw(EngineOrder(key="plain", spec=SPEC))
    assert_close(plain.latents[0], plain_latent)
    assert lora_weights(easel.engine).patched is None


def test_unlike_sets_plain_rows_and_controlnets_share_groups_and_each_is_its_own_stock_picture(
    model: Model, easels: Easels, stock: Any, tmp_path: Path
) -> None:
    folders = save({"edges": random_controlnet(model.backbone.network, 0)}, tmp_path)
    image = control_image(1)
    unguided = replace(SPEC, guidance_scale=1.0, seed=3, sampler=SamplerKind.DDIM)
    jobs: dict[str, tuple[ResolvedSpec, dict[str, float]]] = {
        "plain": (SPEC, {}),
        "outline": (replace(SPEC, seed=1, num_inference_steps=7), {"outline": 0.8}),
        "outline too": (replace(SPEC, seed=2), {"outline": 0.8}),
        "three": (replace(SPEC, seed=4), THREE),
        "weaker": (replace(SPEC, seed=5), {"outline": 0.2}),
        "unguided": (unguided, {"pixel": 0.7}),
    }
    controlled = styled_order({"pastel": 1.0}, replace(SPEC, controlnets=(control_spec("edges", image),)), "controlled")
    with shelf_of(model, folders) as shelf:
        easel = easels(patches=True, controlnets=LocalControlNets(shelf))
        orders = [styled_order(scales, spec, key) for key, (spec, scales) in jobs.items()]
        drawings = easel.run({0: [*orders, replace(controlled, control_images=(image,))]})
        assert lora_weights(easel.engine).swaps <= 2  # for the last ones, when they are alone
        alone = easels(patches=False, controlnets=LocalControlNets(shelf))
        assert_close(
            drawings["controlled"].latents[0],
            alone.draw(replace(controlled, control_images=(image,))).latents[0],
        )
    assert drawings["three"].record.provenance.mean_group_requests > 3
    for key, (spec, scales) in jobs.items():
        theirs = reference(stock, spec, scales)
        assert_close(drawings[key].latents[0], theirs)


def reference(stock: Any, spec: ResolvedSpec, scales: Mapping[str, float], from_step: int = 0) -> Tensor:
    before = stock.scheduler
    stock.scheduler = spec.sampler.scheduler_class.from_config(before.config)
    latent = styled_latent(stock, spec, scales, from_step)
    stock.scheduler = before
    return latent


@pytest.mark.parametrize(("patches", "pinned"), [(False, False), (True, False), (True, True)])
def test_a_late_set_draws_what_stock_draws_that_is_switched_at_that_step(
    easels: Easels, stock: Any, loras: LorasByHand, patches: bool, pinned: bool
) -> None:
    scales = {"pastel": 1.0, "outline": 0.8}
    easel = easels(patches=patches)
    if pinned:
        drawing = easel.draw(styled_order(scales, from_step=3))
    else:
        loras.here.clear()  # their text part is here
        drawing = easel.submit(styled_order(scales, bound=4))
        while not drawing.events or drawing.job is None or drawing.job.steps_done < 3:
            easel.turn()
        loras.come(*scales)
        easel.run()
    assert [event.decisions for event in drawing.all(JobDecided)] == [loras_at(3)]
    assert_close(drawing.latents[0], styled_latent(stock, SPEC, scales, 3))
    assert (drawing.latents[0] - styled_latent(stock, SPEC, scales)).abs().max() > 0.01


@pytest.mark.parametrize("at", [2, 4], ids=["before they went in", "after"])
def test_a_resumed_attempt_uses_its_loras_from_the_same_step(
    easels: Easels, stock: Any, loras: LorasByHand, at: int
) -> None:
    scales = {"pastel": 1.0}
    spec = replace(SPEC, num_inference_steps=7, sampler=SamplerKind.DPMPP_2M)
    every_step = replace(TOGETHER, checkpoint_interval_s=1e-9)
    loras.here.clear()
    easel = easels(limits=every_step)
    first = easel.submit(styled_order(scales, spec, bound=6))
    while first.job is None or first.job.steps_done < 3:
        easel.turn()
    loras.come("pastel")
    easel.run()
    (went_in,) = first.all(JobDecided)
    checkpoint = next(event.data for event in first.all(JobCheckpointed) if event.steps_done == at)
    again = easels(limits=every_step)
    order = replace(styled_order(scales, spec, bound=6), checkpoint=checkpoint, decisions=went_in.decisions)
    resumed = again.draw(order)
    assert [each.from_step for each in resumed.record.provenance.loras] == [3]
    assert resumed.job is not None
    assert resumed.job.steps_resumed == at
    assert_close(resumed.latents[0], reference(stock, spec, scales, 3))
    assert_close(resumed.latents[0], first.latents[0])


HALF_SPEC = replace(SPEC, num_inference_steps=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
def test_in_half_precision_a_picture_with_loras_has_the_bits_of_stock(dtype: torch.dtype) -> None:
    """PEFT rounds each product, its scaling and each sum; LoRAs of one module add in the order of the request."""
    pipeline, components = styled_stock(small_model(), dtype)
    model = load(small_model(), dtype=dtype)
    easel = ManualEngine(make_engine(model, TOGETHER, loras=LorasByHand.of(components)))
    for scales in ({"pastel": 0.8}, {"pixel": 0.3, "pastel": 1.1, "outline": 0.5}):
        drawing = easel.draw(styled_order(scales, HALF_SPEC))
        assert torch.equal(drawing.latents[0], styled_latent(pipeline, HALF_SPEC, scales))
        assert drawing.record.exact
        assert not any(use.rounded_otherwise for use in drawing.record.provenance.loras)
        assert lora_weights(easel.engine).patched is None
    plain = easel.draw(EngineOrder(key="plain", spec=HALF_SPEC))
    assert torch.equal(plain.latents[0], styled_latent(pipeline, HALF_SPEC, {}))


def test_loras_merged_into_half_precision_say_that_they_are_not_exact(
    styled: tuple[Any, dict[str, Components]],
) -> None:
    model = load(small_model(), dtype=torch.bfloat16)
    source = LorasByHand.of(styled[1])
    engine = make_engine(model, TOGETHER, loras=source, merges_half=True)
    lora_weights(engine).costs = FixedCosts(pays=True)
    drawing = ManualEngine(engine).draw(styled_order({"pastel": 0.8}, HALF_SPEC))
    assert lora_weights(engine).patched is not None
    assert not drawing.record.exact
    assert [use.rounded_otherwise for use in drawing.record.provenance.loras] == [True]
