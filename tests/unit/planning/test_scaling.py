"""How many services a model needs, over minutes of simulated jobs, and how hosts share them."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from bottega.planning.scaling import ArrivalRate, Need, PoolState, Supply, TargetCount, Work, services_needed, share_out

KEEP_S, WAIT_S, JOB_S = 60.0, 10.0, 5.0


@dataclass(slots=True, kw_only=True)
class Fleet:
    """A simulated fleet whose services each run one job at a time, scaled once a second."""

    start_s: float = 5.0
    minimum: int = 1
    now: float = 0.0
    waiting: deque[float] = field(default_factory=deque)
    """When each waiting job arrived."""
    busy: list[float] = field(default_factory=list)
    """Seconds that each running job still takes."""
    ready: int = 1
    starting: list[float] = field(default_factory=list)
    """Seconds until each service is ready."""
    counts: list[int] = field(default_factory=list)
    """Number of services, by second."""
    waits_s: list[float] = field(default_factory=list)
    jobs: ArrivalRate = field(default_factory=ArrivalRate)
    seconds: ArrivalRate = field(default_factory=ArrivalRate)
    target: TargetCount = field(default_factory=lambda: TargetCount(1, 0.0))

    def run(self, seconds: int, per_s: float, chance: random.Random | None = None) -> list[int]:
        """Let jobs arrive, evenly or by chance; return the number of services in each of these seconds."""
        owed = 0.0
        for _ in range(seconds):
            owed += per_s
            count = int(owed) if chance is None else sum(chance.random() < per_s / 20 for _ in range(20))
            owed -= int(owed)
            for _ in range(count):
                self.waiting.append(self.now)
                self.jobs.note(1, self.now)
                self.seconds.note(JOB_S, self.now)
            self._serve()
            self._scale()
            self.counts.append(self.ready + len(self.starting))
        return self.counts[-seconds:]

    def _serve(self) -> None:
        self.busy = [left - 1.0 for left in self.busy if left > 1.0]
        while self.waiting and len(self.busy) < self.ready:
            self.waits_s.append(self.now - self.waiting.popleft())
            self.busy.append(JOB_S)
        self.now += 1.0
        self.starting = [left - 1.0 for left in self.starting]
        self.ready += sum(left <= 0 for left in self.starting)
        self.starting = [left for left in self.starting if left > 0]

    def _scale(self) -> None:
        work = Work(
            waiting=len(self.waiting),
            waiting_s=JOB_S * len(self.waiting),
            running_s=tuple(self.busy),
            arriving=self.jobs.per_s(self.now),
            arriving_s=self.seconds.per_s(self.now),
        )
        supply = Supply(ready=self.ready, starting_s=tuple(self.starting), start_s=self.start_s)
        need = services_needed(work, supply, wait_s=WAIT_S)
        count = max(self.target.update(need, self.now, hold_s=KEEP_S), self.minimum)
        while self.ready + len(self.starting) < count:
            self.starting.append(self.start_s)
        while self.ready + len(self.starting) > count:
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1


def changes(counts: list[int]) -> int:
    return sum(before != after for before, after in itertools.pairwise(counts))


def test_a_lasting_step_of_the_load_gets_services_for_it_and_some_room() -> None:
    fleet = Fleet()
    fleet.run(300, 0.1)
    counts = fleet.run(600, 1.0)
    assert 6 <= counts[-1] <= 10, "5 s of work come each second"
    assert changes(counts[300:]) <= 2
    late = fleet.waits_s[-100:]
    assert max(late) <= WAIT_S


def test_a_tenfold_burst_is_answered_before_the_average_follows_and_ends() -> None:
    fleet = Fleet()
    before = max(fleet.run(300, 0.2))
    burst = fleet.run(60, 2.0)
    assert max(burst[:20]) >= 3 * before
    assert max(burst) <= 25, "10 s of work come each second, and the backlog is caught up with"
    after = fleet.run(600, 0.2)
    assert after[-1] <= before
    assert all(later <= earlier for earlier, later in itertools.pairwise(after[70:]))


def test_chance_arrivals_start_and_stop_few_services() -> None:
    fleet, chance = Fleet(), random.Random(7)
    fleet.run(600, 1.0, chance)
    counts = fleet.run(3600, 1.0, chance)
    assert changes(counts) <= 60, "once a minute at the most"
    assert max(counts) - min(counts) <= 8


def test_slow_starters_are_not_started_by_the_dozen() -> None:
    quick, slow = Fleet(), Fleet(start_s=120.0)
    for fleet in (quick, slow):
        fleet.run(300, 0.1)
        fleet.run(1200, 1.0)
    assert max(slow.counts) <= 1.6 * max(quick.counts) + 4
    assert slow.waits_s[-1] <= WAIT_S


def test_services_that_are_starting_are_counted() -> None:
    work = Work(waiting=20, waiting_s=100.0)
    none, one = (
        services_needed(work, Supply(starting_s=starting_s, start_s=20.0), wait_s=WAIT_S).least
        for starting_s in ((), (20.0,))
    )
    assert none == one == 5, "100 s of work over 20 s after their start"


def test_the_last_service_stops_when_the_minimum_is_zero_and_a_job_starts_one() -> None:
    fleet = Fleet(minimum=0)
    assert fleet.run(300, 0.0)[-1] == 0
    fleet.waiting.append(fleet.now)
    assert fleet.run(1, 0.0) == [1]
    fleet.run(30, 0.0)
    assert fleet.waits_s, "the job is done"


def test_one_long_job_is_not_worth_a_second_service() -> None:
    alone = Work(running_s=(600.0,))
    assert services_needed(alone, Supply(ready=1, start_s=5.0), wait_s=WAIT_S).least == 1
    waiting = Work(waiting=1, waiting_s=600.0)
    assert services_needed(waiting, Supply(start_s=5.0), wait_s=WAIT_S).least == 1


def test_times_that_are_no_numbers_end_in_an_error_and_not_in_services() -> None:
    for seconds in (float("nan"), float("inf")):
        with pytest.raises((ValueError, OverflowError)):
            services_needed(Work(waiting=1, waiting_s=seconds), Supply(ready=1), wait_s=WAIT_S)


def test_a_need_that_ends_counts_until_its_time_is_over() -> None:
    target = TargetCount(1, 0.0)
    assert target.update(Need(least=4, most=4), 10.0, hold_s=KEEP_S) == 4
    assert target.update(Need(least=1, most=1), 69.0, hold_s=KEEP_S) == 4
    assert target.update(Need(least=1, most=2), 71.0, hold_s=KEEP_S) == 2


def test_hosts_keep_what_runs_and_share_what_is_new() -> None:
    left, right = (PoolState(minimum=1, maximum=4, count=count) for count in (3, 1))
    assert [share_out(count, [left, right]) for count in (4, 6, 99, 2, 0)] == [[3, 1], [3, 3], [4, 4], [1, 1], [1, 1]]
    failing = PoolState(minimum=2, maximum=0, count=0)
    assert share_out(3, [failing, PoolState(minimum=0, maximum=4, count=0)]) == [0, 3]
