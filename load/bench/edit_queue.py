"""Edits that come at random times to an engine in this process, and how long each takes from its arrival.

The clock is the engine's own work: it goes on by what a turn takes, and by what is added to it, and where nobody is
there it jumps to the next arrival. An engine has no other thread of work, so that this is what a clock on the wall
would say, without the time in which nothing happens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from bottega.diffusion.engine.addon import EngineAddOn, JobAddOn
from bottega.diffusion.engine.encode import Conditions
from bottega.diffusion.engine.engine import Engine
from bottega.diffusion.engine.events import JobFailed, JobFinished
from bottega.diffusion.engine.job import EngineJob, EngineOrder
from bottega.diffusion.engine.request import Request
from bottega.planning import RemainingWork, best_width

MAX_BATCH = 8
# Rows of a guided request.
_ROWS = 2
_MOST_BEHIND = 16
_MAX_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arriving:
    """An edit. at_s: when it comes, after the start."""

    at_s: float
    order: EngineOrder


class EditQueue:
    """What waits, what the engine has, and the clock. stall_s: what every joining and every leaving adds to it."""

    def __init__(self, engine: Engine, arriving: Sequence[Arriving], *, stall_s: float = 0.0) -> None:
        self.engine = engine
        self.clock_s = 0.0
        self.waiting: deque[Arriving] = deque()
        self.drawing: set[Hashable] = set()
        self.ended: list[Hashable] = []
        self.stalls = 0
        self._stall_s = stall_s
        self._coming = deque(arriving)

    @property
    def over(self) -> bool:
        """Whether all have been drawn."""
        return not (self._coming or self.waiting or self.drawing)

    def arrive(self) -> None:
        """Takes in those that have come; waits for the next one where there is nothing to do."""
        if not self.waiting and not self.drawing and self._coming:
            self.clock_s = max(self.clock_s, self._coming[0].at_s)
        while self._coming and self._coming[0].at_s <= self.clock_s:
            self.waiting.append(self._coming.popleft())

    def submit(self, steps: int = 0) -> None:
        """Gives the engine the one that waits longest. steps: that it has instead of its own; 0 is its own."""
        order = self.waiting.popleft().order
        if steps not in (0, order.spec.num_inference_steps):
            order = replace(order, spec=replace(order.spec, num_inference_steps=steps))
        self.drawing.add(order.key)
        self.engine.submit(order)
        self._stall()

    def turn(self) -> None:
        """The engine's next turn."""
        began_s = perf_counter()
        events = list(self.engine.turn())
        self.clock_s += perf_counter() - began_s
        for event in events:
            if isinstance(event, JobFailed):
                raise event.error
            if isinstance(event, JobFinished):
                self._stall()
                self.drawing.remove(event.key)
                self.ended.append(event.key)

    def _stall(self) -> None:
        self.stalls += self._stall_s > 0.0
        self.clock_s += self._stall_s


Admit = Callable[[EditQueue], None]
"""Submits those that are the engine's turn now."""


def step_by_step(queue: EditQueue) -> None:
    """Edits join at every step, as many as a gateway would give this engine, and one more to be encoded meanwhile."""
    engine = queue.engine
    engine.set_backlog(len(queue.waiting))
    while queue.waiting and len(queue.drawing) <= _width(engine, len(queue.waiting)):
        queue.submit()


def _width(engine: Engine, waiting: int) -> int:
    """Requests that run together, as a gateway reckons from what workers report of turns, steps to go and masks."""
    shape = next(shape for shape, _, _ in engine.step_times.entries())
    shares = engine.computed_shares()

    def work(key: Hashable, steps: int) -> RemainingWork:
        return RemainingWork(
            rows=_ROWS * engine.row_fractions.fraction(shape, shares.get(key, mean_share)), steps=steps
        )

    mean_share = sum(shares.values()) / len(shares) if shares else 1.0
    here = [work(key, steps) for key, steps in engine.steps_left()]
    behind = [here[-1]] * min(waiting, _MOST_BEHIND) if here else []

    def seconds(rows: float) -> float:
        measured = engine.step_times.seconds(shape, rows)
        return rows if measured is None else measured

    return best_width([*here, *behind], seconds, max_rows=_MAX_ROWS)


class StaticBatches(EngineAddOn):
    """All that wait, at most eight, run together to the longest of their steps, and all of them are answered then.

    As an add-on it holds a batch's first step back until the last of it has been encoded. The engine has to admit all
    that fit into a turn: max_wait_turns of 0.
    """

    kind = "static"

    def __init__(self) -> None:
        self.members = 0
        self.attached = 0

    def __call__(self, queue: EditQueue) -> None:
        """The next batch, where there is none."""
        if queue.drawing:
            return
        self.members, self.attached = min(len(queue.waiting), MAX_BATCH), 0
        batch = list(queue.waiting)[: self.members]
        longest = max((each.order.spec.num_inference_steps for each in batch), default=0)
        for _ in batch:
            queue.submit(longest)

    def open(self, order: EngineOrder) -> JobAddOn:
        return _Member(self)


class _Member(JobAddOn):
    """A job of a batch."""

    def __init__(self, batches: StaticBatches) -> None:
        self._batches = batches

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        self._batches.attached += 1

    def blocks(self, request: Request) -> bool:
        return self._batches.attached < self._batches.members


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """took_s: of each, from its arrival to its end, in the order of arrival. busy_s: that the clock ran with somebody
    there. stalls: how often it was held up.
    """

    took_s: tuple[float, ...]
    busy_s: float
    stalls: int


def serve(
    engine: Engine, arriving: Sequence[Arriving], admit: Admit, *, together: bool = False, stall_s: float = 0.0
) -> Served:
    """Draws all. together: whether those of a batch are answered when the last of it has ended."""
    queue = EditQueue(engine, arriving, stall_s=stall_s)
    ends_s: dict[Hashable, float] = {}
    idle_s = 0.0
    while not queue.over:
        before_s = queue.clock_s
        queue.arrive()
        idle_s += queue.clock_s - before_s
        admit(queue)
        queue.turn()
        if not (together and queue.drawing):
            ends_s |= dict.fromkeys(queue.ended, queue.clock_s)
            queue.ended.clear()
    took_s = tuple(ends_s[each.order.key] - each.at_s for each in arriving)
    return Served(took_s=took_s, busy_s=queue.clock_s - idle_s, stalls=queue.stalls)
