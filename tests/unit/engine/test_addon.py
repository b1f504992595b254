"""The engine's add-on interface, by one that the engine does not know: it holds a job before one of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from bottega.engine.addon import EngineAddOn, JobAddOn
from bottega.engine.events import EngineRecord, ImageDrawn, JobDecided, JobStarted
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import Unavailable
from bottega.model.model import Model
from tests.samples.small_model import SIZE
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine

SPEC = ResolvedSpec(prompt="a small green circle", num_inference_steps=4, width=SIZE, height=SIZE, seed=1)
HOLD_AT = 2


@dataclass(eq=False)
class Held(JobAddOn):
    """Holds a job before one step until it is let go."""

    addon: Hold
    job: EngineJob | None = None
    here: bool = False
    steps: list[int] = field(default_factory=list)
    closed: int = 0

    def ready(self, now_s: float) -> bool:
        return self.addon.prompts

    def attach(self, job: EngineJob, conditions: Any, now_s: float) -> None:
        self.job = job

    def update(self, now_s: float) -> None:
        if self.addon.error is not None:
            raise self.addon.error
        self.here = self.addon.let_go
        self.decision = b"here" if self.here else None

    def blocks(self, request: Request) -> bool:
        return not self.here and request.step >= HOLD_AT

    def after_step(self, request: Request) -> None:
        self.steps.append(request.step)

    def report(self, record: EngineRecord) -> None:
        record.exact = False
        record.seconds["held"] = 1.5

    def close(self) -> None:
        self.closed += 1


@dataclass(eq=False)
class Hold(EngineAddOn):
    """An add-on of jobs whose key says so."""

    kind = "hold"

    prompts: bool = True
    let_go: bool = False
    error: Exception | None = None
    parts: list[Held] = field(default_factory=list)
    waits: int = 0

    def open(self, order: EngineOrder) -> JobAddOn | None:
        if order.key == "refused":
            raise Unavailable("there is nothing to hold it with")
        if order.key != "held":
            return None
        self.parts.append(Held(self))
        return self.parts[-1]

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        assert list(parts) == self.parts
        self.waits += 1


@pytest.fixture
def hold() -> Hold:
    return Hold()


@pytest.fixture
def easel(model: Model, hold: Hold) -> ManualEngine:
    limits = EngineLimits(max_wait_turns=0, progress_interval_s=0.0)
    return ManualEngine(make_engine(model, limits, addons=[hold]))


def test_a_job_waits_decides_and_reports_by_an_add_on_that_the_engine_does_not_know(
    easel: ManualEngine, hold: Hold
) -> None:
    hold.prompts = False
    held = easel.submit(EngineOrder(key="held", spec=SPEC))
    easel.turn()
    assert (held.events, hold.waits) == ([], 1), "its prompt is not encoded, and the engine sleeps meanwhile"
    hold.prompts = True
    for _ in range(4 * SPEC.steps):
        easel.turn()
    (part,) = hold.parts
    assert [type(event) for event in held.events[:1]] == [JobStarted]
    assert part.steps == [1, HOLD_AT], "the steps before it run, the others wait"
    other = easel.submit(EngineOrder(key="free", spec=SPEC))
    while not other.ended:
        easel.turn()
    assert other.all(ImageDrawn), "nobody else waits"
    hold.let_go = True
    easel.run()
    assert [event.decisions for event in held.all(JobDecided)] == [{"hold": b"here"}]
    assert part.steps == [1, 2, 3, 4]
    assert (held.record.exact, held.record.seconds["held"], other.record.exact) == (False, 1.5, True)
    assert part.closed == 1


def test_what_an_add_on_cannot_serve_is_refused_or_fails_alone(easel: ManualEngine, hold: Hold) -> None:
    with pytest.raises(Unavailable):
        easel.submit(EngineOrder(key="refused", spec=SPEC))
    held, free = (easel.submit(EngineOrder(key=key, spec=SPEC)) for key in ("held", "free"))
    easel.turn()
    hold.error = Unavailable("it never comes")
    easel.run()
    assert held.error is hold.error
    assert free.all(ImageDrawn)
    assert [part.closed for part in hold.parts] == [1]
