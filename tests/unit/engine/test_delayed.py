"""The engine on a device that is behind it, as a GPU is: what it draws and says, and that it waits where it says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.engine.events import ImageDrawn, JobAdvanced, JobCheckpointed, JobFailed, JobFinished
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.errors import NotFinite
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import shelf_of
from tests.samples.masked_edits import ELSEWHERE, FIRST, SECOND, EditDesk
from tests.samples.masked_edits import SPEC as EDITED
from tests.samples.small_model import SIZE, small_model
from tests.support.controlled_engine import controlled, random_folders
from tests.support.delayed_device import STEPS, DelayedDevice
from tests.support.engines import make_engine
from tests.support.hidden_waits import hidden_waits_refused
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.torch_threads import torch_threads

SPEC = ResolvedSpec(prompt="a red star", num_inference_steps=4, width=SIZE, height=SIZE, seed=3)
OTHER = replace(SPEC, prompt="a blue circle", seed=4, num_inference_steps=7, sampler=SamplerKind.DPMPP_2M)
# Says every step, and saves each.
TALKATIVE = EngineLimits(max_rows=4, progress_interval_s=0.0)
# The same, whoever shares a group with whom.
EQUAL = replace(TALKATIVE, fixed_rows=4)


def on(device: DelayedDevice, model: Model, limits: EngineLimits = TALKATIVE) -> ManualEngine:
    return ManualEngine(make_engine(replace(model, runtime=device), limits))


def orders() -> list[EngineOrder]:
    return [EngineOrder(key="first", spec=SPEC, preview=True), EngineOrder(key="other", spec=OTHER)]


def said(drawing: Drawing) -> list[object]:
    """All but the record, whose times differ."""
    found: list[object] = []
    for event in drawing.events:
        match event:
            case JobAdvanced():
                preview = None if event.preview is None else event.preview.numpy().tobytes()
                found.append((event.steps_done, event.preview_index, preview))
            case JobCheckpointed():
                found.append((event.steps_done, event.data))
            case ImageDrawn():
                found.append(event.pixels.numpy().tobytes())
            case _:
                found.append(type(event))
    return found


def test_a_device_that_is_behind_draws_and_says_the_same(model: Model) -> None:
    with torch_threads(1):
        here = ManualEngine(make_engine(model, EQUAL)).run({0: orders()})
        device = DelayedDevice()
        with device.running(0.002):
            there = on(device, model, EQUAL).run({0: orders()})
    for key, drawing in here.items():
        assert said(there[key]) == said(drawing)


def test_no_step_waits_for_a_device_that_keeps_pace(model: Model) -> None:
    device = DelayedDevice()
    easel = on(device, model)
    for order in orders():
        easel.submit(order)
    while easel.engine.busy:
        turns, waits = easel.engine.turns, device.waits
        easel.turn()
        if easel.engine.turns > turns:  # else an image may be decoded, and there is nothing else to do
            assert device.waits == waits
        device.finish()
    assert all(isinstance(drawing.events[-1], JobFinished) for drawing in easel.drawings.values())


def test_the_thread_is_at_most_one_forward_ahead(model: Model) -> None:
    device = DelayedDevice()
    easel = on(device, model)
    easel.submit(EngineOrder(key="first", spec=replace(SPEC, num_inference_steps=9)))
    easel.turn()
    easel.turn()
    assert device.waits == 0
    assert easel.engine.turns == 2
    for turn in range(3, 8):
        easel.turn()
        assert easel.engine.turns == turn
        assert device.waits == turn - 2


def test_steps_of_others_go_on_while_an_image_is_decoded(model: Model) -> None:
    device = DelayedDevice()
    easel = on(device, model)
    first, other = (easel.submit(order) for order in orders())
    while not device.streams.get("decode"):
        easel.turn()
        device.finish(STEPS)
    steps = sum(isinstance(event, JobAdvanced) for event in other.events)
    for _ in range(2):
        easel.turn()
        device.finish(STEPS)
    assert sum(isinstance(event, JobAdvanced) for event in other.events) == steps + 2
    assert not first.all(ImageDrawn)
    device.finish()
    easel.turn()
    assert first.ended
    assert device.waits == 0


def test_a_job_that_is_cancelled_while_it_is_decoded_says_nothing_more(model: Model) -> None:
    device = DelayedDevice()
    easel = on(device, model)
    drawing = easel.submit(orders()[0])
    while not device.streams.get("decode"):
        easel.turn()
        device.finish(STEPS)
    easel.engine.cancel("first")
    assert not easel.engine.busy
    device.finish()
    easel.turn()
    assert not drawing.all(ImageDrawn)
    assert easel.draw(replace(orders()[1], key="next")).ended


@pytest.mark.parametrize("steps", [2, 4], ids=["checkpoint", "image"])
def test_a_latent_that_is_not_finite_is_noticed_when_its_copy_comes(model: Model, steps: int) -> None:
    device = DelayedDevice()
    easel = on(device, model)
    drawing = easel.submit(orders()[0])
    while drawing.job is None or drawing.job.steps_done < steps - 1:
        easel.turn()
        device.finish()
    request = drawing.job.requests[0]
    request.latent = torch.full_like(request.latent, torch.nan)
    easel.run()
    assert isinstance(drawing.events[-1], JobFailed)
    assert isinstance(drawing.error, NotFinite)
    assert not drawing.all(ImageDrawn)
    assert all(saved.steps_done < steps for saved in drawing.all(JobCheckpointed))


PLAIN = EngineOrder(key="plain", spec=replace(EDITED, strength=None), preview=True)
ANCESTRAL = replace(PLAIN, key="ancestral", spec=replace(PLAIN.spec, seed=9, sampler=SamplerKind.EULER_ANCESTRAL))
# Its image is embedded at the first step that it controls, which is none of the first.
CONTROLLED = controlled((0, 0.8), spec=PLAIN.spec, control_guidance_start=0.5)

# By what they are: what is drawn before, and what is drawn together.
CASES: dict[str, tuple[Sequence[EngineOrder], Sequence[EngineOrder]]] = {
    "plain": ([], [PLAIN, ANCESTRAL]),
    "an edit that records": ([], [FIRST]),
    "an edit beside a plain row": ([FIRST], [SECOND, PLAIN]),
    "plain rows around an edit": ([FIRST], [PLAIN, SECOND, ANCESTRAL]),
    "an edit that completes a recording": ([FIRST], [ELSEWHERE]),
    "with a ControlNet": ([], [CONTROLLED, PLAIN]),
}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def placed_model(request: pytest.FixtureRequest) -> Model:
    return load(small_model(), device=request.param)


@pytest.fixture(scope="module")
def desk(placed_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EditDesk]:
    folders = random_folders(placed_model, tmp_path_factory.mktemp("controlnets"))
    with shelf_of(placed_model, folders) as shelf:
        yield EditDesk(placed_model, controlnets=LocalControlNets(shelf))


@pytest.mark.parametrize("case", CASES)
def test_no_step_makes_its_thread_wait_unsaid(desk: EditDesk, case: str, caplog: pytest.LogCaptureFixture) -> None:
    before, together = CASES[case]
    desk.source.drop("")
    for order in before:
        desk.draw(order)
    drawings = [desk.submit(order) for order in together]
    while min(map(steps_done, drawings)) == 0:
        desk.turn()  # encodes prompts, and loads ControlNets
    with hidden_waits_refused(desk.engine.model.device):
        while min(map(steps_done, drawings)) < EDITED.num_inference_steps:
            desk.turn()
    desk.run()
    assert not [each for each in caplog.messages if "a batch failed" in each]  # its requests had gone on one by one
    assert all(isinstance(drawing.events[-1], JobFinished) for drawing in drawings)


def steps_done(drawing: Drawing) -> int:
    assert not drawing.all(JobFailed)
    return drawing.job.requests[0].step if drawing.job is not None else 0
