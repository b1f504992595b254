"""An engine in this process, turned by hand: what it says is kept by job, and jobs may come at any turn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from bottega.engine.engine import Engine
from bottega.engine.events import (
    EngineRecord,
    Event,
    ImageDrawn,
    JobAdvanced,
    JobCheckpointed,
    JobDecided,
    JobFailed,
    JobFinished,
    JobKept,
    JobStarted,
)
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.spans import EngineTrace
from bottega.errors import BottegaError
from bottega.miniature import WEIGHTS
from bottega.model.loading import load_model
from bottega.model.model import Model
from tests.support.stock import Pixels

# An engine that never ends must not hang a test.
MOST_TURNS = 1000

Said = TypeVar(
    "Said", JobStarted, JobDecided, JobAdvanced, JobCheckpointed, ImageDrawn, JobKept, JobFinished, JobFailed
)


@dataclass(slots=True, kw_only=True, eq=False)
class Drawing:
    """What an engine said of one job. job: the engine's own, once it has started."""

    job: EngineJob | None = None
    events: list[Event] = field(default_factory=list)

    def all(self, kind: type[Said]) -> list[Said]:
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def ended(self) -> bool:
        """Whether the last word on it has been said."""
        return bool(self.events) and isinstance(self.events[-1], JobFinished | JobFailed)

    @property
    def latents(self) -> list[Tensor]:
        """Of every image, as they are now."""
        assert self.job is not None
        return [request.latent for request in self.job.requests]

    @property
    def pixels(self) -> list[Pixels]:
        """Of every image, in their order."""
        drawn = {event.index: event.pixels.numpy() for event in self.all(ImageDrawn)}
        return [drawn[index] for index in sorted(drawn)]

    @property
    def record(self) -> EngineRecord:
        """What happened to it; it must have finished."""
        (finished,) = self.all(JobFinished)
        return finished.record

    @property
    def trace(self) -> EngineTrace:
        """What of it took how long; it must have ended."""
        last = self.events[-1]
        assert isinstance(last, JobFinished | JobFailed)
        return last.trace

    @property
    def error(self) -> BottegaError:
        """Why it failed; it must have."""
        (failed,) = self.all(JobFailed)
        return failed.error


class ManualEngine:
    """Turns an engine and keeps what it says: `drawings` by key."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.drawings: dict[Hashable, Drawing] = {}

    def submit(self, order: EngineOrder) -> Drawing:
        drawing = self.drawings[order.key] = Drawing()
        self.engine.submit(order)
        return drawing

    def turn(self) -> list[Event]:
        said: list[Event] = []
        for event in self.engine.turn():
            drawing = self.drawings[event.key]
            if isinstance(event, JobStarted):
                drawing.job = self.engine.jobs[event.key]
            drawing.events.append(event)
            said.append(event)
        return said

    def run(self, arrivals: Mapping[int, Sequence[EngineOrder]] | None = None) -> dict[Hashable, Drawing]:
        """Turns until there is nothing left to do. arrivals: jobs by the turn, from now on, before which they come."""
        left = dict(arrivals or {})
        for turn in range(MOST_TURNS):
            for order in left.pop(turn, ()):
                self.submit(order)
            if not left and not self.engine.busy:
                return self.drawings
            self.turn()
        raise AssertionError(f"the engine is still busy after {MOST_TURNS} turns")

    def draw(self, order: EngineOrder) -> Drawing:
        """One job from its beginning to its end."""
        drawing = self.submit(order)
        self.run()
        return drawing


def load(folder: Path = WEIGHTS, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Model:
    """A model; the embedded one without a folder."""
    return load_model(folder, name="miniature", device=torch.device(device), dtype=dtype)
