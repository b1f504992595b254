"""Steps of all kinds make their thread wait for the device nowhere but where it says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.engine.events import JobFailed, JobFinished
from bottega.engine.job import EngineOrder
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import shelf_of
from tests.samples.masked_edits import ELSEWHERE, FIRST, SECOND, SPEC, EditDesk
from tests.samples.small_model import small_model
from tests.support.controlled_engine import controlled, random_folders
from tests.support.hidden_waits import hidden_waits_refused
from tests.support.manual_engine import Drawing, load

PLAIN = EngineOrder(key="plain", spec=replace(SPEC, strength=None), preview=True)
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
        while min(map(steps_done, drawings)) < SPEC.num_inference_steps:
            desk.turn()
    desk.run()
    assert not [each for each in caplog.messages if "a batch failed" in each]  # its requests had gone on one by one
    assert all(isinstance(drawing.events[-1], JobFinished) for drawing in drawings)


def steps_done(drawing: Drawing) -> int:
    assert not drawing.all(JobFailed)
    return drawing.job.requests[0].step if drawing.job is not None else 0
