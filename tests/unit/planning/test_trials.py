"""A worker that began on a busy machine becomes as wide as pays off, through gateway and engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bottega.engine.batcher import Batcher
from bottega.gateway.scheduling.policy import PendingJob, assign
from bottega.gateway.scheduling.worker_plan import ResourceRequest, WorkerState
from bottega.model.rows import GroupKey
from bottega.planning import StepTimes
from bottega.planning.cost import OUTDATED_TURNS, TRIAL_PAUSE_TURNS

SHAPE = (16, 16)
KEY = GroupKey(shape=(4, *SHAPE), tokens=77, dtype=torch.float32)
ROWS, MAX_ROWS, STEPS = 2, 16, 20


def cost_s(rows: int) -> float:
    """Most of a turn is there anyway: all requests should share it."""
    return 0.2 + 0.01 * rows


@dataclass(eq=False)
class Asked:
    """A request."""

    done: int = 0
    key: GroupKey = KEY
    row_count: int = ROWS
    computed_share: float = 1.0
    packs: bool = False
    evaluations: int = STEPS

    @property
    def evaluations_left(self) -> int:
        return STEPS - self.done


class Worker:
    """An engine's batcher, with the requests that the gateway gives it of a queue that never ends."""

    def __init__(self, times: StepTimes) -> None:
        self.times = times
        self.here: list[Asked] = []
        self.widths: list[int] = []
        self.batcher: Batcher[Asked] = Batcher(times, max_rows=MAX_ROWS, max_wait_turns=8)

    def turn(self) -> None:
        """Make a turn. Meanwhile the gateway gives what it should by what the worker has reported."""
        entries = list(self.times.entries())
        outdated = {(shape, rows) for shape, rows, _ in entries if self.times.outdated(shape, rows)}
        requests = [ResourceRequest(rows=ROWS, steps=asked.evaluations_left, shape=SHAPE) for asked in self.here]
        times = StepTimes.from_entries(entries, outdated=outdated)
        seat = WorkerState(worker="w1", running=tuple(requests), times=times, fixed_s=0.0, max_rows=MAX_ROWS)
        request = ResourceRequest(rows=ROWS, steps=STEPS, shape=SHAPE)
        given = assign([PendingJob(job_id=str(n), request=request) for n in range(8)], [seat], waiting=8)
        if self.here:
            self._draw(self.batcher.next_turn().requests)
        for _ in given:
            self.here.append(asked := Asked())
            self.batcher.add(asked)

    def _draw(self, group: Sequence[Asked]) -> None:
        self.times.observe(SHAPE, ROWS * len(group), cost_s(ROWS * len(group)))
        self.widths.append(len(group))
        for asked in group:
            asked.done += 1
            if not asked.evaluations_left:
                self.batcher.remove(asked)
                self.here.remove(asked)


def test_a_gateway_gives_such_a_worker_what_it_needs_to_find_out() -> None:
    """Where turns are long, no two jobs are at a worker at once but for a moment, unless they are given for this."""
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16):
        for _ in range(3):
            times.observe(SHAPE, rows, rows * cost_s(rows))  # each turn was held up for longer than the last
    worker = Worker(times)
    for _ in range(OUTDATED_TURNS + 7 * TRIAL_PAUSE_TURNS):
        worker.turn()
    assert set(worker.widths[:50]) == {1}
    assert set(worker.widths[-50:]) == {8}
