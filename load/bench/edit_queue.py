"""Edits that come at random times to an engine in this process, and how long each takes from its arrival.

The clock is the engine's own work: it goes on by what a turn takes, and by what is added to it. Where there is nothing
to do, it jumps to the next arrival. An engine has no other thread of work, so a clock on the wall would show the same
without the idle time.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import torch

from bottega.addons.edits.engine.addon import EngineEdits
from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.engine.addon import EngineAddOn, JobAddOn
from bottega.engine.encode import Conditions
from bottega.engine.engine import Engine
from bottega.engine.events import JobFailed, JobFinished
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.planning import RemainingWork, best_width
from load.bench.edit_model import placed_mask, template
from load.bench.engine_runs import accelerate, edit_order, load_bench_model, run_orders

MAX_BATCH = 8
# Rows of a guided request.
_ROWS = 2
_MOST_BEHIND = 16
_MAX_ROWS = 16
_RECORDINGS_BYTES = 4 << 30
# Of the least mask, at two places: the second completes what the first did not record.
_RECORDED_SHARES = (0.0, 0.0)


class EditDesk:
    """Makes engines over one loaded model and one memory of recordings, and orders of edits of one template.

    Args:
        model: Folder of the bench model.
        steps: Numbers of steps of edits; a template is recorded for each of them, as their timesteps differ.
        threads: Of torch.
    """

    def __init__(self, model: Path, *, steps: Sequence[int], threads: int) -> None:
        torch.set_num_threads(threads)
        self._steps = steps
        self._model = load_bench_model(model)
        self._accelerated = False
        self._recordings = MemoryActivations(_RECORDINGS_BYTES)
        self._template = template()

    def engine(self, limits: EngineLimits, addons: Sequence[EngineAddOn] = ()) -> Engine:
        """Return an engine that has measured what its turns take."""
        engine = Engine(self._model, limits, addons=(EngineEdits(self._model, self._recordings), *addons))
        if not self._accelerated:
            accelerate(engine)
            self._accelerated = True
        engine.warm_up()
        return engine

    def record(self, engine: Engine) -> None:
        """Record all of the template."""
        for steps, (number, share) in itertools.product(self._steps, enumerate(_RECORDED_SHARES)):
            run_orders(engine, [self.order(f"record {number}", share, random.Random(number), steps)])

    def order(self, key: Hashable, share: float, chance: random.Random, steps: int) -> EngineOrder:
        """Return an edit whose mask has this share of the tokens, anywhere."""
        mask = placed_mask(share, chance)
        return edit_order(key, self._template, mask, steps=steps, seed=chance.randrange(1 << 31))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arriving:
    """An edit that comes after so many seconds."""

    at_s: float
    order: EngineOrder


class EditQueue:
    """Edits that wait, those that the engine has, and the clock.

    Args:
        stall_s: Seconds that every joining and every leaving adds to the clock.
    """

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
        """Take in those that have come; wait for the next one where there is nothing to do."""
        if not self.waiting and not self.drawing and self._coming:
            self.clock_s = max(self.clock_s, self._coming[0].at_s)
        while self._coming and self._coming[0].at_s <= self.clock_s:
            self.waiting.append(self._coming.popleft())

    def submit(self, steps: int = 0) -> None:
        """Give the engine the one that waits longest, with other steps than its own unless they are 0."""
        order = self.waiting.popleft().order
        if steps not in (0, order.spec.num_inference_steps):
            order = replace(order, spec=replace(order.spec, num_inference_steps=steps))
        self.drawing.add(order.key)
        self.engine.submit(order)
        self._stall()

    def turn(self) -> None:
        """Make the engine's next turn."""
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
"""Submits those whose turn it is."""


def step_by_step(queue: EditQueue) -> None:
    """Admit as many edits as a gateway would give this engine, at every step, and one more to be encoded meanwhile."""
    engine = queue.engine
    engine.set_backlog(len(queue.waiting))
    while queue.waiting and len(queue.drawing) <= _width(engine, len(queue.waiting)):
        queue.submit()


def _width(engine: Engine, waiting: int) -> int:
    """Return how many requests run together, as a gateway reckons from the turns, steps and masks of a worker."""
    shape = next(shape for shape, _, _ in engine.step_times.entries())
    shares = engine.computed_shares()
    mean_share = sum(shares.values()) / len(shares) if shares else 1.0

    def work(key: Hashable, steps: int) -> RemainingWork:
        fraction = engine.row_fractions.fraction(shape, shares.get(key, mean_share))
        return RemainingWork(rows=_ROWS * fraction, steps=steps)

    here = [work(key, steps) for key, steps in engine.evaluations_left()]
    behind = [here[-1]] * min(waiting, _MOST_BEHIND) if here else []

    def seconds(rows: float) -> float:
        measured = engine.step_times.seconds(shape, rows)
        return rows if measured is None else measured

    return best_width([*here, *behind], seconds, max_rows=_MAX_ROWS)


class StaticBatches(EngineAddOn):
    """Runs all that wait, at most eight, together to the longest of their steps.

    As an add-on it holds a batch's first step back until the last of it has been encoded. The engine has to admit all
    that fit into a turn: max_wait_turns of 0.
    """

    kind = "static"

    def __init__(self) -> None:
        self.members = 0
        self.attached = 0

    def __call__(self, queue: EditQueue) -> None:
        """Submit the next batch, where none is drawn."""
        if queue.drawing:
            return
        self.members, self.attached = min(len(queue.waiting), MAX_BATCH), 0
        batch = list(queue.waiting)[: self.members]
        longest = max((each.order.spec.num_inference_steps for each in batch), default=0)
        for _ in batch:
            queue.submit(longest)

    def open(self, order: EngineOrder) -> JobAddOn:
        return _Member(self)

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Return at once, because the rest of the batch is encoded meanwhile."""


class _Member(JobAddOn):
    def __init__(self, batches: StaticBatches) -> None:
        self._batches = batches

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        self._batches.attached += 1

    def blocks(self, request: Request) -> bool:
        return self._batches.attached < self._batches.members


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A run of edits."""

    took_s: tuple[float, ...]
    """Seconds of each from its arrival to its end, in the order of arrival."""
    busy_s: float
    """Seconds of the clock in which there was something to do."""
    stalls: int
    """How often the clock was held up."""


def serve(
    engine: Engine, arriving: Sequence[Arriving], admit: Admit, *, together: bool = False, stall_s: float = 0.0
) -> Served:
    """Draw all edits.

    Args:
        together: Whether those of a batch are answered when the last of it has ended.
        stall_s: See `EditQueue`.
    """
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
