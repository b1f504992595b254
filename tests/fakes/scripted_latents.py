"""A source of cached latents whose every answer is the test's, and an engine that draws with it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from bottega.addons.cache.engine import JobRecording, LatentQuestion, LatentReply
from bottega.addons.cache.engine.addon import EngineCachedStarts
from bottega.engine.addon import EngineAddOn
from bottega.engine.engine import Engine
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.model.model import Model
from bottega.v1.cache_pb2 import (
    CACHE_OUTCOME_HIT,
    CACHE_OUTCOME_MISS,
    CacheAnswer,
    CacheOutcome,
    CacheStart,
    CacheStarts,
)
from bottega.v1.fleet_pb2 import ServiceAddress
from tests.support.addon_messages import cache_order
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine

# How long a job waits for what it has to start from.
TIMEOUT_S = 10.0
# Pictures are equal byte for byte, whatever else the engine does.
FIXED = EngineLimits(fixed_rows=2, max_wait_turns=0, progress_interval_s=0.0)

Hit = tuple[str, int, Tensor]


def entry(number: int) -> str:
    return f"{number:032x}"


def answer(
    *hits: Hit, record: bool = False, outcome: CacheOutcome.ValueType | None = None, similarity: float = 0.9
) -> LatentReply:
    """Hits by entry, step and latent."""
    starts = [CacheStart(entry=name, step=step, similarity=similarity) for name, step, _ in hits]
    said = (CACHE_OUTCOME_HIT if hits else CACHE_OUTCOME_MISS) if outcome is None else outcome
    header = CacheAnswer(hits=starts, outcome=said, record=record)
    return LatentReply(header=header, latents=tuple(latent for _, _, latent in hits))


@dataclass(eq=False)
class ScriptedLatents:
    """A LatentSource. answers: to the next questions, at once; where there is none more, the question waits in `open`.

    pinned: latents that questions by name are answered with, where they may be. linked: stores that would hear one.
    """

    answers: list[LatentReply] = field(default_factory=list)
    pinned: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    full: bool = False
    linked: int = 1
    asked: list[LatentQuestion] = field(default_factory=list)
    open: list[Future[LatentReply]] = field(default_factory=list)
    recordings: list[JobRecording] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    reports: list[CacheStarts] = field(default_factory=list)

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        self.stores = [store.name for store in stores]

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        self.asked.append(question)
        answered = Future[LatentReply]()
        wanted = [(start.entry, start.step) for start in question.header.pinned]
        if self.answers:
            answered.set_result(self.answers.pop(0))
        elif self.pinned:
            found = [(*name, self.pinned[name]) for name in wanted if name in self.pinned]
            answered.set_result(answer(*found))
        else:
            self.open.append(answered)
        return answered

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        self.reports.append(starts)

    def record(self, recording: JobRecording) -> bool:
        if not self.full:
            self.recordings.append(recording)
        return not self.full


class Cached:
    """An engine whose pictures may start from what `source` says. after: further add-ons; options: see make_engine."""

    def __init__(
        self,
        model: Model,
        source: ScriptedLatents | None = None,
        *,
        limits: EngineLimits = FIXED,
        after: Sequence[EngineAddOn] = (),
        **options: Any,
    ) -> None:
        self.source = source or ScriptedLatents()
        self.starts = EngineCachedStarts(model, self.source, timeout_s=TIMEOUT_S)
        self.engine: Engine = make_engine(model, limits, addons=(self.starts, *after), **options)
        self.easel = ManualEngine(self.engine)

    def draw(self, order: EngineOrder, *, at_turn: int = 0, hits: Sequence[Hit] = ()) -> Drawing:
        """Draws to the end. hits: the answer, which comes when the engine has made so many turns; none where empty."""
        drawing = self.easel.submit(order)
        for turn in range(1000):
            if hits and turn == at_turn:
                self.tell(answer(*hits))
            if drawing.ended:
                return drawing
            self.easel.turn()
        raise AssertionError("it does not end")

    def tell(self, said: LatentReply) -> None:
        """The answer to the oldest open question, or to the next one."""
        if self.source.open:
            self.source.open.pop(0).set_result(said)
        else:
            self.source.answers.append(said)


def cached(order: EngineOrder, **fields: object) -> EngineOrder:
    """The order, with what may be done with cached latents."""
    return replace(order, addons={**order.addons, **cache_order(**fields)})  # type: ignore[arg-type]  # a test's own
