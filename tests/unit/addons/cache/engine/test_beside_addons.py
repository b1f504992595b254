"""Cached starts of jobs that have more to them: LoRAs that come late, ControlNets in a part of the steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bottega.addons.cache.engine import LatentReply
from bottega.addons.cache.engine.recorder import StartingPicture
from bottega.addons.cache.starts import format_start
from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets
from bottega.engine.encode import encode_prompts
from bottega.engine.job import EngineOrder
from bottega.engine.request import ActiveControl, Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.model_files.family_names import UNET
from bottega.v1.cache_pb2 import CacheStart
from tests.fakes.scripted_latents import Cached, Hit, ScriptedLatents, answer, cached, entry
from tests.samples.controlnets import control_image, control_spec, random_controlnet, save, shelf_of
from tests.samples.engine_loras import TEXT, LorasByHand, lora_spec, random_layers
from tests.support.manual_engine import Drawing

SPEC = ResolvedSpec(prompt="a small green circle", num_inference_steps=10, width=32, height=32, seed=5)
LATENT = 3 * torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0))
HIT: Hit = (entry(1), 5, LATENT)
PIN = format_start(entry(1), 5)


def styled(**lora: int) -> EngineOrder:
    return cached(EngineOrder(key="styled", spec=replace(SPEC, loras=(lora_spec("ink", **lora),))))


@pytest.fixture
def loras(model: Model) -> LorasByHand:
    return LorasByHand.of({"ink": {UNET: random_layers(model.backbone.network, 1)}}, here=False)


def begun(desk: Cached, loras: LorasByHand, order: EngineOrder, turns: int) -> Drawing:
    """After so many turns, of which the LoRA is here from the last one on."""
    loras.text.add("ink")
    drawing = desk.easel.submit(order)
    for _ in range(turns):
        desk.easel.turn()
    loras.come("ink")
    return drawing


@pytest.fixture
def at_once(model: Model, loras: LorasByHand) -> Drawing:
    """The picture from HIT with the LoRA there from the beginning."""
    desk = Cached(model, ScriptedLatents([answer(HIT)]), loras=loras)
    drawing = begun(desk, loras, styled(), 0)
    desk.easel.run()
    loras.here.clear()
    return drawing


def test_a_hit_waits_for_the_lora_and_is_taken_when_that_is_in(
    model: Model, loras: LorasByHand, at_once: Drawing
) -> None:
    desk = Cached(model, ScriptedLatents([answer(HIT)]), loras=loras)
    drawing = begun(desk, loras, styled(bound=8), 3)
    assert drawing.job is not None
    assert drawing.job.requests[0].step == 3, "the job does not wait"
    desk.easel.run()
    assert torch.equal(drawing.latents[0], at_once.latents[0])
    assert [start.from_step for start in drawing.record.provenance.cached_starts] == [4]
    assert [lora.from_step for lora in drawing.record.provenance.loras] == [3]
    assert desk.starts.counts["steps_skipped"] == 1


def test_a_hit_is_too_late_when_the_lora_is(model: Model, loras: LorasByHand, at_once: Drawing) -> None:
    desk = Cached(model, ScriptedLatents([answer(HIT, record=True)]), loras=loras)
    drawing = begun(desk, loras, styled(bound=8), 6)
    desk.easel.run()
    assert not drawing.record.provenance.cached_starts
    assert [lora.from_step for lora in drawing.record.provenance.loras] == [6]
    assert desk.starts.counts["late_hits"] == 1
    assert desk.source.recordings == [], "not exact from the first step on"
    loras.here.clear()
    early = Cached(model, ScriptedLatents([answer(record=True)]), loras=loras)
    begun(early, loras, styled(bound=8), 0)
    early.easel.run()
    assert len(early.source.recordings) == 1, "this one is"


def test_a_pinned_picture_waits_for_its_lora(model: Model, loras: LorasByHand, at_once: Drawing) -> None:
    desk = Cached(model, ScriptedLatents([answer(HIT)]), loras=loras)
    order = styled(bound=8)
    drawing = begun(desk, loras, cached(order, pin=PIN), 9)
    assert drawing.job is None, "it has not begun"
    desk.easel.run()
    assert torch.equal(drawing.latents[0], at_once.latents[0])


@pytest.mark.parametrize("pinned", [True, False])
def test_a_latent_before_the_step_of_its_loras_is_not_started_from(
    model: Model, loras: LorasByHand, pinned: bool
) -> None:
    desk = Cached(model, ScriptedLatents([answer(HIT)]), loras=loras)
    order = styled(from_step=6)
    drawing = begun(desk, loras, cached(order, pin=PIN) if pinned else order, 0)
    desk.easel.run()
    if pinned:
        assert isinstance(drawing.error, InvalidRequest)
        assert PIN in drawing.error.message
    else:
        assert not drawing.record.provenance.cached_starts
        assert desk.starts.counts["unfit_hits"] == 1


def without_loras() -> LatentReply:
    """HIT, from an entry that was recorded without any."""
    said = answer(HIT)
    said.header.hits[0].without_loras = True
    return said


def test_a_hit_without_loras_is_taken_before_they_are_here(model: Model, loras: LorasByHand) -> None:
    desk = Cached(model, ScriptedLatents([without_loras()]), loras=loras)
    drawing = begun(desk, loras, styled(bound=8), 2)
    assert drawing.job is not None
    assert drawing.job.requests[0].step == 6, "from step 4 on, two turns"
    desk.easel.run()
    (start,) = drawing.record.provenance.cached_starts
    assert (start.from_step, start.without_loras) == (4, True)
    assert [lora.from_step for lora in drawing.record.provenance.loras] == [6]
    assert not drawing.record.exact


def test_a_picture_from_a_hit_without_loras_is_drawn_again_with_its_pin_and_the_step_of_its_loras(
    model: Model, loras: LorasByHand
) -> None:
    pictures = []
    for order, turns in (
        (styled(bound=8), 2),
        (cached(styled(from_step=6), pin=PIN), 0),  # as its provenance says
        (styled(bound=8), 0),
        (cached(styled(from_step=0), pin=PIN), 0),
    ):
        loras.here.clear()
        desk = Cached(model, ScriptedLatents([without_loras()]), loras=loras)
        drawing = begun(desk, loras, order, turns)
        desk.easel.run()
        assert drawing.record.provenance.cached_starts[0].from_step == 4
        pictures.append(drawing.latents[0])
    assert torch.equal(pictures[0], pictures[1])
    assert torch.equal(pictures[2], pictures[3])
    assert not torch.equal(pictures[0], pictures[2])


def test_a_picture_that_a_hit_moves_to_the_step_of_its_loras_waits_for_them(model: Model, loras: LorasByHand) -> None:
    """Whether they come before the latent or after it, the first step after the start has them."""
    pictures = []
    for order, turns in (
        (styled(bound=4), 0),
        (styled(bound=4), 3),  # they are late: the hit comes in the first turn
        (cached(styled(from_step=4, bound=4), pin=PIN), 0),
        (cached(styled(from_step=4, bound=4), pin=PIN), 3),
        (cached(styled(from_step=2, bound=4), pin=PIN), 3),
    ):
        loras.here.clear()
        desk = Cached(model, ScriptedLatents([without_loras()]), loras=loras)
        drawing = begun(desk, loras, order, turns)
        desk.easel.run()
        assert drawing.record.provenance.cached_starts[0].from_step == 4
        assert all(lora.from_step <= 4 for lora in drawing.record.provenance.loras), (
            "no step after the bound is without them"
        )
        pictures.append(drawing.latents[0])
    for picture in pictures[1:]:
        assert torch.equal(picture, pictures[0])


@pytest.mark.parametrize(
    ("lora", "plain_steps"),
    [({"bound": 8}, 8), ({"bound": 0}, 0), ({"from_step": 6, "bound": 8}, 0), ({"bound": 50}, 9)],
)
def test_the_store_is_asked_for_latents_without_loras_up_to_the_step_that_they_may_come_late(
    model: Model, loras: LorasByHand, lora: dict[str, int], plain_steps: int
) -> None:
    desk = Cached(model, loras=loras)
    begun(desk, loras, styled(**lora), 0)
    desk.draw(cached(EngineOrder(key="plain", spec=SPEC)), hits=[HIT])
    with_lora, plain = (asked.header for asked in desk.source.asked)
    assert with_lora.plain_key == plain.key != with_lora.key
    assert with_lora.plain_steps == plain_steps
    assert not plain.plain_key


def test_loras_that_change_the_prompt_are_served_by_their_own_entries_alone(model: Model) -> None:
    text = random_layers(model.text_encoders[0], 2, targets=TEXT)
    loras = LorasByHand.of({"ink": {UNET: random_layers(model.backbone.network, 1), "text_encoder": text}})
    desk = Cached(model, ScriptedLatents([answer(), answer()]), loras=loras)
    for order in (styled(bound=8), cached(EngineOrder(key="plain", spec=SPEC))):  # the second takes them out again
        desk.easel.submit(order)
        desk.easel.run()
    assert not desk.source.asked[0].header.plain_key


@pytest.fixture(scope="module")
def shelf(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlNetCache]:
    nets = {"edges": random_controlnet(model.backbone.network, 0)}
    folders: dict[str, Path] = save(nets, tmp_path_factory.mktemp("controlnets"))
    with shelf_of(model, folders) as shelf:
        yield shelf


def controlled(start: float, end: float) -> EngineOrder:
    image = control_image(1, 32, 32)
    control = control_spec("edges", image, digest="d" * 64, control_guidance_start=start, control_guidance_end=end)
    return cached(EngineOrder(key=1, spec=replace(SPEC, controlnets=(control,)), control_images=(image,)))


def test_controlnets_are_active_in_the_steps_that_the_request_says(model: Model, shelf: ControlNetCache) -> None:
    def draw(order: EngineOrder, turn: int) -> Tensor:
        return Cached(model, controlnets=LocalControlNets(shelf)).draw(order, at_turn=turn, hits=[HIT]).latents[0]

    plain = draw(cached(EngineOrder(key=1, spec=SPEC)), 0)
    assert torch.equal(draw(controlled(0.0, 0.3), 2), plain), "it is over when the picture starts"
    whole = draw(controlled(0.0, 1.0), 0)
    assert torch.equal(draw(controlled(0.0, 1.0), 2), whole)
    assert torch.equal(draw(controlled(0.4, 1.0), 2), whole), "its steps are counted from the first one of all"
    assert not torch.equal(draw(controlled(0.5, 1.0), 2), whole)


@pytest.mark.parametrize(
    ("stale", "controls", "outcome"), [(True, 1, "late_hits"), (True, 0, "hits"), (False, 1, "hits")]
)
def test_no_start_is_at_the_step_after_one_whose_residuals_may_have_been_asked_for(
    model: Model, stale: bool, controls: int, outcome: str
) -> None:
    """They would be taken for those of the step before, in which the picture was another one."""
    spec = replace(SPEC, stale_residuals=stale)
    request = Request(model, spec, encode_prompts(model, spec))
    request.controls = tuple(ActiveControl(handle="net", first=0, last=10) for _ in range(controls))
    picture = StartingPicture(request=request)
    start = CacheStart(entry=entry(1), step=5)
    request.evaluation, picture.hit = 3, (start, LATENT)
    assert picture.take_hit() == outcome
    request.evaluation, picture.hit = 2, (start, LATENT)
    assert picture.take_hit() == "hits"
    assert request.step == 4
