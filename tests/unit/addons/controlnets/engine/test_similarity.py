"""How similar a ControlNet's residuals are from step to step, as the engine measures it for those who ask."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets
from bottega.addons.controlnets.engine.addon import JobControlNets
from bottega.addons.controlnets.engine.provider import ControlInput, SimilarityMeter
from bottega.engine.encode import encode_prompts
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import DRAWN, caption, held_out_scenes, random_layout
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row
from tests.samples.controlnets import control_spec, shelf_of
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load

NETS = {name: WEIGHTS / "controlnets" / name for name in ("edges", "layout")}
NOTHING = Embeds(prompt=torch.zeros(1, 1), added={"text_embeds": torch.zeros(1), "time_ids": torch.zeros(6)})


@pytest.fixture(scope="module")
def model() -> Model:
    """The embedded one, which its own ControlNets fit."""
    return load()


@pytest.fixture(scope="module")
def shelf(model: Model) -> Iterator[ControlNetCache]:
    with shelf_of(model, NETS) as shelf:
        yield shelf


def draw(model: Model, nets: LocalControlNets, names: Sequence[str], *, steps: int, measured: bool = True) -> Drawing:
    """A picture of one of the miniature's own scenes, with its own ControlNets."""
    rng = random.Random(0)
    (scene,) = held_out_scenes(1, things=1)
    images = tuple(torch.from_numpy(np.array(DRAWN[name](random_layout(scene, rng)))) for name in names)
    controls = tuple(control_spec(name, image, measured=measured) for name, image in zip(names, images, strict=True))
    spec = ResolvedSpec(prompt=caption(scene), num_inference_steps=steps, width=64, height=64, controlnets=controls)
    return ManualEngine(make_engine(model, EngineLimits(), controlnets=nets)).draw(
        EngineOrder(key="job", spec=replace(spec, stale_residuals=True), control_images=images)
    )


def test_who_does_not_ask_pays_nothing_and_one_step_says_nothing(model: Model, shelf: ControlNetCache) -> None:
    for steps, measured, said in ((2, False, False), (1, True, False), (2, True, True)):
        drawing = draw(model, LocalControlNets(shelf), ["edges"], steps=steps, measured=measured)
        (use,) = drawing.record.provenance.controlnets
        assert use.HasField("similarity") is said


def test_what_is_measured_is_never_one_step_old(model: Model, shelf: ControlNetCache) -> None:
    asked: list[ControlInput] = []

    class Listening(LocalControlNets):
        def open(self, controls: Sequence[ControlInput]) -> tuple[object, ...]:
            asked.extend(controls)
            return super().open(controls)

    image = torch.zeros(64, 64, 3, dtype=torch.uint8)
    for measured in (True, False):
        spec = ResolvedSpec(
            prompt="", width=64, height=64, controlnets=(control_spec("edges", image, measured=measured),)
        )
        conditions = encode_prompts(model, spec)
        order = EngineOrder(key=0, spec=replace(spec, stale_residuals=True), control_images=(image,))
        sessions = JobControlNets(Listening(shelf), order, model)
        sessions.begin(conditions, [Request(model, spec, conditions)])
        sessions.close()
    assert [control.may_be_stale for control in asked] == [False, True]


def test_a_step_that_is_repeated_counts_once_and_as_it_came_last() -> None:
    meter = SimilarityMeter()
    for step, values in ((0, [1.0, 0.0]), (1, [0.0, 1.0]), (1, [1.0, 1.0]), (2, [1.0, 1.0])):
        slot = torch.tensor(values)
        meter.observe(row(step), 0, slot)
        slot.zero_()  # its sender has the memory back
    assert meter.cosines == pytest.approx([0.5**0.5, 1.0])
    assert meter.similarity == pytest.approx((0.5**0.5 + 1.0) / 2)
    meter.observe(row(4), 0, torch.ones(2))
    assert len(meter.cosines) == 2, "steps that are no neighbours are not compared"


def row(step: int) -> Row:
    sample = torch.zeros(1, 1, 1)
    return Row(owner="owner", step=step, half=Half.CONDITIONAL, sample=sample, timestep=torch.zeros(()), embeds=NOTHING)
