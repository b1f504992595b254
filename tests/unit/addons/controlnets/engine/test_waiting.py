"""Jobs whose ControlNets are not there: who waits, who does not, what each failure is, and what is given back."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets
from bottega.addons.controlnets.engine.addon import OPENING_TIMEOUT_S, JobControlNets
from bottega.engine import waiting
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import encode_prompts
from bottega.engine.events import JobStarted
from bottega.engine.forward import Network
from bottega.engine.job import EngineOrder
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ControlNetUnusable, TooLarge, Unavailable
from bottega.model.model import Model
from tests.samples.controlnets import Gate, control_image, control_spec, shelf_of
from tests.samples.small_model import SIZE
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import ManualEngine

PLAIN = ResolvedSpec(prompt="a small green circle", num_inference_steps=3, width=SIZE, height=SIZE, seed=1)
LONG = replace(PLAIN, num_inference_steps=40)
IMAGE = control_image(1)
WAIT_S = 20.0

Shelves = Callable[..., AbstractContextManager[ControlNetCache]]


def controlled(*names: str, key: str = "controlled", spec: ResolvedSpec = PLAIN, **options: Any) -> EngineOrder:
    """A job with these ControlNets, all with one image."""
    specs = tuple(control_spec(name, IMAGE, **options) for name in names or ("edges",))
    return EngineOrder(key=key, spec=replace(spec, controlnets=specs), control_images=(IMAGE,) * len(specs))


def easel_of(model: Model, shelf: ControlNetCache, **options: Any) -> ManualEngine:
    return ManualEngine(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf), **options))


def assert_all_given_back(shelf: ControlNetCache) -> None:
    """With room for one, the other one has room only when that one is on lease no more."""
    for name in ("edges", "depth"):
        hold = shelf.borrow([name])
        assert hold.values.result(WAIT_S)
        shelf.give_back(hold)


def test_a_job_waits_for_its_controlnet_while_others_are_drawn(model: Model, shelves: Shelves) -> None:
    gate = Gate()
    with shelves(load=gate) as shelf:
        easel = easel_of(model, shelf)
        waiting = easel.submit(controlled())
        other = easel.submit(EngineOrder(key="plain", spec=PLAIN))
        while not other.ended:
            easel.turn()
        assert not waiting.all(JobStarted)
        gate.open()
        easel.run()
        assert waiting.record.seconds["controlnets"] > other.record.seconds["denoise"]
        assert waiting.record.provenance.mean_group_requests == 1


def test_an_engine_with_nothing_to_do_but_wait_sleeps_and_hears_of_the_load(model: Model, shelves: Shelves) -> None:
    gate = Gate()
    with shelves(load=gate) as shelf:
        easel = easel_of(model, shelf)
        drawing = easel.submit(controlled())
        easel.turn()
        began_s, turns = time.monotonic(), 0
        while time.monotonic() - began_s < 0.5:
            easel.turn()
            turns += 1
        assert turns <= 0.5 / waiting._PAUSE_S + 1
        gate.open()
        easel.run()
        assert drawing.record.provenance.controlnets[0].name == "edges"


def test_a_job_ends_its_loan_with_its_last_image(model: Model, shelves: Shelves, size_bytes: int) -> None:
    with shelves(budget_bytes=size_bytes) as shelf:
        easel = easel_of(model, shelf)
        drawings = easel.run({0: [controlled(name, key=name) for name in ("edges", "depth")]})
        assert all(drawing.pixels for drawing in drawings.values())
        assert_all_given_back(shelf)


def test_a_controlnet_is_given_back_after_its_last_step(model: Model, shelves: Shelves, size_bytes: int) -> None:
    with shelves(budget_bytes=size_bytes) as shelf:
        easel = easel_of(model, shelf)
        early = easel.submit(controlled("edges", key="early", spec=LONG, control_guidance_end=0.1))
        late = easel.submit(controlled("depth", key="late"))
        while not late.all(JobStarted):
            easel.turn()
        assert not early.ended
        easel.run()
        assert early.record.provenance.controlnets[0].waited_s > 0


@pytest.mark.parametrize("turns", [1, 3], ids=["while it waits", "in the middle"])
def test_a_cancelled_job_gives_its_loan_back(model: Model, shelves: Shelves, size_bytes: int, turns: int) -> None:
    gate = Gate()
    with shelves(budget_bytes=size_bytes, load=gate) as shelf:
        easel = easel_of(model, shelf)
        drawing = easel.submit(controlled())
        easel.turn()
        if turns > 1:
            gate.open()
            while not drawing.all(JobStarted):
                easel.turn()
        easel.engine.cancel("controlled")
        assert not easel.engine.busy
        gate.open()
        assert_all_given_back(shelf)


def test_what_can_never_be_there_fails_its_job_alone(model: Model, shelves: Shelves, size_bytes: int) -> None:
    with shelves(budget_bytes=size_bytes) as shelf:
        orders = [controlled("edges", "depth", key="two"), EngineOrder(key="plain", spec=PLAIN)]
        drawings = easel_of(model, shelf).run({0: orders})
        assert isinstance(drawings["two"].error, TooLarge)
        assert drawings["plain"].pixels
        assert_all_given_back(shelf)
    without = ManualEngine(make_engine(model, TOGETHER)).draw(controlled())
    assert isinstance(without.error, Unavailable)


def test_a_job_does_not_wait_for_ever(model: Model, shelves: Shelves) -> None:
    gate, now_s = Gate(), 0.0
    with shelves(load=gate) as shelf:
        easel = easel_of(model, shelf, clock=lambda: now_s)
        drawing = easel.submit(controlled())
        easel.turn()
        now_s = OPENING_TIMEOUT_S + 1
        easel.run()
        assert isinstance(drawing.error, Unavailable)
        assert "within 120 s" in drawing.error.message
        gate.open()


def opened(model: Model, controlnets: LocalControlNets, order: EngineOrder) -> Request:
    """A request as it stands when its server has died: its session is begun here, and its ControlNet not loaded."""
    conditions = encode_prompts(model, order.spec)
    sessions = JobControlNets(controlnets, order, model)
    request = Request(model, order.spec, conditions)
    sessions.begin(conditions, [request])
    return request


def test_asked_for_what_can_never_be_there_it_says_why(model: Model, folders: dict[str, Path], tmp_path: Path) -> None:
    mine = {"edges": Path(shutil.copytree(folders["edges"], tmp_path / "edges"))}
    with shelf_of(model, mine) as shelf:
        (mine["edges"] / "diffusion_pytorch_model.safetensors").unlink()
        controlnets = LocalControlNets(shelf)
        late = opened(model, controlnets, controlled())
        with pytest.raises(ControlNetUnusable, match="ControlNet edges"):
            Denoiser(Network(backbone=model.backbone, residuals=controlnets)).predict(late.rows())


def test_asked_before_it_is_loaded_a_row_is_late_and_alone_it_is_waited_for(model: Model, shelves: Shelves) -> None:
    gate = Gate()
    with shelves(load=gate) as shelf:
        controlnets = LocalControlNets(shelf)
        predict = Denoiser(Network(backbone=model.backbone, residuals=controlnets)).predict
        late = opened(model, controlnets, controlled())
        other = Request(model, PLAIN, encode_prompts(model, PLAIN))
        assert {row.owner for row in predict([*late.rows(), *other.rows()]).noise} == {other}
        gate.open()
        prediction = predict(late.rows())
        assert len(prediction.noise) == 2
        assert prediction.waited_s > 0
        (record,) = controlnets.close([control.handle for control in late.controls])
        assert 0 < record.waited_s <= prediction.waited_s
