"""A worker that began on a busy machine becomes as wide as pays off, through gateway and engine, and at what cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.engine.batcher import Batcher
from bottega.gateway.scheduling.policy import PendingJob, assign
from bottega.gateway.scheduling.worker_plan import ResourceRequest, WorkerState
from bottega.model.rows import GroupKey
from bottega.planning import StepTimes
from bottega.planning.cost import OUTDATED_TURNS, TRIAL_PAUSE_TURNS

Cost = Callable[[int], float]

SHAPE = (16, 16)
KEY = GroupKey(shape=(4, *SHAPE), tokens=77, dtype=torch.float32)
ROWS, MAX_ROWS = 2, 16
WARM_UP_ROWS = (1, 2, 4, 8, 16)


def slow(rows: int) -> float:
    """Most of a turn is there anyway: all that there are should share it."""
    return 0.2 + 0.01 * rows


def large(rows: int) -> float:
    """Doubling the rows doubles the turn: nobody should share it."""
    return 0.05 * rows


def measured(cost: Cost) -> StepTimes:
    """As an engine is when it is warm."""
    times = StepTimes()
    for rows in WARM_UP_ROWS:
        for _ in range(3):
            times.observe(SHAPE, rows, cost(rows))
    return times


@dataclass(eq=False)
class Asked:
    """A request of so many steps."""

    steps: int = 20
    done: int = 0
    key: GroupKey = KEY
    row_count: int = ROWS
    computed_share: float = 1.0

    @property
    def evaluations(self) -> int:
        return self.steps

    @property
    def evaluations_left(self) -> int:
        return self.steps - self.done


@dataclass(eq=False)
class Worker:
    """An engine's batcher with the requests that it is given. learns: whether its turns are such as can be measured."""

    times: StepTimes
    cost: Cost
    learns: bool = True
    here: list[Asked] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.batcher: Batcher[Asked] = Batcher(self.times, max_rows=MAX_ROWS, max_wait_turns=8)

    def take(self, count: int) -> None:
        for _ in range(count):
            asked = Asked()
            self.here.append(asked)
            self.batcher.add(asked)

    def turn(self) -> None:
        group = self.batcher.next_turn().requests
        rows = sum(asked.row_count for asked in group)
        if self.learns:
            self.times.observe(SHAPE, rows, self.cost(rows))
        for asked in group:
            asked.done += 1
            if not asked.evaluations_left:
                self.batcher.remove(asked)
                self.here.remove(asked)
        self.widths.append(len(group))


def turn_with_a_queue(worker: Worker, queued: int) -> None:
    """One turn; meanwhile the gateway gives what it should of a queue that never ends, by what the worker reported."""
    entries = list(worker.times.entries())
    outdated = {(shape, rows) for shape, rows, _ in entries if worker.times.outdated(shape, rows)}
    seat = WorkerState(
        worker="w1",
        running=tuple(ResourceRequest(rows=ROWS, steps=asked.evaluations_left, shape=SHAPE) for asked in worker.here),
        times=StepTimes.from_entries(entries, outdated=outdated),
        fixed_s=0.0,
        max_rows=MAX_ROWS,
    )
    waiting = [
        PendingJob(job_id=str(n), request=ResourceRequest(rows=ROWS, steps=20, shape=SHAPE)) for n in range(queued)
    ]
    given = assign(waiting, [seat], waiting=len(waiting))
    if worker.here:
        worker.turn()
    worker.take(len(given))


def run(worker: Worker, turns: int, *, clients: int) -> Sequence[int]:
    """The widths of so many turns with so many requests at any time."""
    for _ in range(turns):
        worker.take(clients - len(worker.here))
        worker.turn()
    return worker.widths[-turns:]


def test_a_gateway_gives_such_a_worker_what_it_needs_to_find_out() -> None:
    """Where turns are long, no two jobs are at a worker at once but for a moment, unless they are given for this."""
    worker = Worker(measured(lambda rows: slow(rows) * rows), slow)  # each turn was held up for longer than the last
    for _ in range(OUTDATED_TURNS + 7 * TRIAL_PAUSE_TURNS):
        turn_with_a_queue(worker, queued=8)
    assert set(worker.widths[:50]) == {1}
    assert set(worker.widths[-50:]) == {8}


@pytest.mark.parametrize("learns", [True, False])
def test_where_sharing_never_pays_few_turns_are_tried(learns: bool) -> None:
    """Also where turns cannot be measured: those with LoRAs, or that are shared by a pair."""
    times = measured(large)
    for _ in range(OUTDATED_TURNS):
        times.observe(SHAPE, ROWS, large(ROWS))
    widths = run(Worker(times, large, learns=learns), 2000, clients=8)
    tried = [turn for turn, width in enumerate(widths) if width > 1]
    assert all(later - earlier >= TRIAL_PAUSE_TURNS for earlier, later in pairwise(tried))
    assert set(widths) == {1, 2}
    assert len(tried) >= 5 if learns else len(tried) == 1


@settings(max_examples=6)
@given(clients=st.integers(2, 8), held_up=st.lists(st.floats(1, 50), min_size=5, max_size=5))
def test_whatever_was_held_up_at_the_start_all_share_a_turn_in_the_end(clients: int, held_up: list[float]) -> None:
    times = dict(zip(WARM_UP_ROWS, held_up, strict=True))
    worker = Worker(measured(lambda rows: slow(rows) * times[rows]), slow)
    run(worker, OUTDATED_TURNS + 6 * TRIAL_PAUSE_TURNS, clients=clients)
    assert set(run(worker, 50, clients=clients)) == {clients}
