"""Which worker takes which waiting job, and when: least estimated completion, bound as late as possible.

Functions of what waits, what runs and what turns cost; the worker's engine plans its groups by the same cost
model. Knows no clock, no jobs' contents and no wire.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from bottega.planning import RemainingWork, Shape, StepTimes, best_width, completion_times, most_on_trial

# Pending jobs that are looked at in one go; those behind them cannot change who is next.
_HORIZON = 32
# Pending jobs that are imagined beside the next one when the width of a group is chosen.
_LOOK_AHEAD = 4
# A job is bound this early, so that its prompt is encoded while the worker is busy: the time to encode a
# prompt and to cross the wire, or one and a half turns, as progress is only known at the end of a turn.
_LEAD_S = 0.05
_LEAD_TURNS = 1.5
# Seconds of one row and turn while nothing was measured: proportional, so that nothing shares a worker then.
_UNMEASURED_S = 0.1
# Outlooks that a seat remembers: of the next jobs of a queue, each with what is behind it.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What a job asks of a worker. rows: in each turn. steps: turns to go. shape: of its latent; (0, 0) is unknown."""

    rows: int
    steps: int
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJob:
    """A job that waits.

    avoid: a worker that must not get it, because it was just lost with it. alone: it may only run by itself, because
    a worker may have died of it. takers: the only workers that may get it, with the seconds that each needs beside it
    for something to load; None is all of them. extra_s: seconds that workers need beside that, where they do.
    """

    job_id: str
    demand: ResourceRequest
    avoid: str = ""
    alone: bool = False
    takers: Mapping[str, float] | None = None
    extra_s: Mapping[str, float] = field(default_factory=dict)

    def may_go_to(self, worker: str) -> bool:
        """Whether that worker may get it."""
        return worker != self.avoid and (self.takers is None or worker in self.takers)

    def load_s(self, worker: str) -> float:
        """Seconds that it needs there before it can begin."""
        return self.extra_s.get(worker, 0.0) + (self.takers[worker] if self.takers is not None else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker as the scheduler sees it. running: what still denoises there, first come first.

    finishing: attempts there that do not denoise any more. closed: one of those there must be left alone.
    fixed_s: seconds that a job takes beside its turns. max_rows: 0 is without bound.
    outlooks: what was found out about it, for the next look at the same seat. It goes with the seat: another one
        is made whenever its worker has moved, or has reported.
    """

    worker: str
    running: tuple[ResourceRequest, ...]
    times: StepTimes
    fixed_s: float
    max_rows: int
    finishing: int = 0
    closed: bool = False
    outlooks: dict[_EstimateKey, _Estimate] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A worker should take a job now. estimate_s: until it completes; None while nothing was measured.

    alone: whether the worker has nothing else.
    """

    job_id: str
    worker: str
    estimate_s: float | None
    alone: bool = False


def assign(waiting: Iterable[PendingJob], seats: Sequence[WorkerState]) -> list[Assignment]:
    """Which of the waiting jobs, first come first, leave the queue now. Looks at no more of them than it must.

    A job goes where it is expected to complete first. If that is a worker that should not take it yet, it
    stays in the queue, and the jobs behind it reckon with it. One that must run alone takes an idle worker, else it has
    one cleared for it: never more than one at a time, so that the others go on. One that few workers may get waits for
    those without holding up the ones behind it elsewhere.
    """
    if not seats:
        return []
    benches = [_WorkerPlan(seat) for seat in seats]
    assignments: list[Assignment] = []
    rest = iter(waiting)
    line = deque(islice(rest, 1 + _LOOK_AHEAD))
    for _ in range(_HORIZON):
        if not line:
            break
        job = line.popleft()
        behind = tuple(other.demand for other in line if not other.alone)
        line.extend(islice(rest, 1))
        eligible = [bench for bench in benches if job.may_go_to(bench.seat.worker)]
        if job.alone:
            eligible = _room_alone(eligible, benches)
        offers = [bench.offer(job.demand, behind) for bench in eligible if not bench.closed]
        if not offers:
            continue
        if job.takers is None and not any(offer.now for offer in offers):
            break
        best = _best(job, offers)
        if best.now:
            assignments.append(_assignment(job, best))
        best.bench.take(job.demand, bound=best.now)
        best.bench.closed = job.alone
    return assignments


def _best(job: PendingJob, offers: Iterable[_Offer]) -> _Offer:
    return min(offers, key=lambda offer: offer.completes_s + job.load_s(offer.bench.seat.worker))


def _room_alone(eligible: list[_WorkerPlan], benches: Sequence[_WorkerPlan]) -> list[_WorkerPlan]:
    """Where a job that must run alone may go now. Where that is nowhere, closes the worker that will be idle first."""
    idle = [bench for bench in eligible if bench.empty]
    if not idle and eligible and not any(bench.closed for bench in benches):
        min(eligible, key=lambda bench: bench.load_s).closed = True
    return idle


class QueueForecast:
    """Who of those that wait would complete when, if nobody came any more: the least loaded worker takes the next.

    For those who wait; nobody is assigned by it.
    """

    def __init__(self, seats: Sequence[WorkerState]) -> None:
        measured = not all(_unmeasured(seat) for seat in seats)
        self._benches = [_WorkerPlan(seat) for seat in seats] if measured else []
        self._loads = [bench.load_s for bench in self._benches]
        self._lines: list[list[int]] = [[] for _ in self._benches]
        self._size = 0

    @property
    def waiting(self) -> int:
        """How many line up."""
        return self._size

    def add(self, demand: ResourceRequest) -> None:
        """One more lines up, last."""
        if self._benches:
            least = self._least()
            self._loads[least] += self._benches[least].alone_s(demand)
            self._benches[least].take(demand, bound=False)
            self._lines[least].append(self._size)
        self._size += 1

    def end_s(self, demand: ResourceRequest) -> float | None:
        """Expected seconds until one that lined up now would complete. None while nothing was measured."""
        if not self._benches:
            return None
        bench = self._benches[self._least()]
        return bench.ends(demand)[-1] + bench.seat.fixed_s

    def least_s(self, demand: ResourceRequest) -> float | None:
        """Seconds that it takes at the least, on the fastest worker and alone. None while that is not measured."""
        if not self._benches or any(bench.unmeasured(demand) for bench in self._benches):
            return None
        return min(bench.alone_s(demand) + bench.seat.fixed_s for bench in self._benches)

    def ends(self) -> list[float | None]:
        """Expected seconds until each of those who were added completes."""
        ends: list[float | None] = [None] * self._size
        for bench, line in zip(self._benches, self._lines, strict=True):
            if not line:
                continue
            for index, end in zip(line, bench.ends()[len(bench.seat.running) :], strict=True):
                ends[index] = end + bench.seat.fixed_s
        return ends

    def _least(self) -> int:
        return self._loads.index(min(self._loads))


def estimates(demands: Iterable[ResourceRequest], seats: Sequence[WorkerState]) -> list[float | None]:
    """Expected seconds until each of the waiting jobs completes; None while nothing was measured."""
    prospect = QueueForecast(seats)
    for demand in demands:
        prospect.add(demand)
    return prospect.ends()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    bench: _WorkerPlan
    completes_s: float
    now: bool


class _WorkerPlan:
    """A worker with what it runs and what it was given or promised in this round."""

    def __init__(self, seat: WorkerState) -> None:
        self.seat = seat
        self.closed = seat.closed
        self._promised = False
        self._planned = list(seat.running)

    @property
    def empty(self) -> bool:
        """Whether nothing is here, nor was promised to be."""
        return not self._planned and not self.seat.finishing

    @property
    def load_s(self) -> float:
        """Seconds that what is here takes, one after the other."""
        return sum(self.alone_s(demand) for demand in self._planned)

    def alone_s(self, demand: ResourceRequest) -> float:
        """Seconds of the turns of `demand`, alone."""
        return _turns(self.seat.times, demand.shape)(demand.rows) * demand.steps

    def offer(self, demand: ResourceRequest, behind: tuple[ResourceRequest, ...]) -> _Offer:
        """When `demand` would complete here, and whether it should come now."""
        outlook = self._outlook(demand, behind)
        completes_s = outlook.end_s + self.seat.fixed_s
        return _Offer(bench=self, completes_s=completes_s, now=outlook.opens and not self._promised)

    def take(self, demand: ResourceRequest, *, bound: bool) -> None:
        """Counts a job in. Behind one that is only promised nobody is bound in this round."""
        self._planned.append(demand)
        self._promised = self._promised or not bound

    def unmeasured(self, demand: ResourceRequest) -> bool:
        """Whether nothing is known of turns of that shape."""
        return self.seat.times.seconds(demand.shape, demand.rows) is None

    def ends(self, *more: ResourceRequest) -> list[float]:
        """When each of the jobs here ends, first come first, and then each of `more`, if they came as well."""
        planned = [*self._planned, *more]
        if not planned:
            return []
        shape = planned[-1].shape
        works, seconds = _works(planned, shape), cache(_turns(self.seat.times, shape))
        width = best_width(works[: 2 * _LOOK_AHEAD], seconds, max_rows=self._max_rows)
        return completion_times(works, seconds, max(1, width))

    def _outlook(self, demand: ResourceRequest, behind: tuple[ResourceRequest, ...]) -> _Estimate:
        known, taken = self.seat.outlooks, tuple(self._planned[len(self.seat.running) :])
        look = (taken, demand, behind)
        if look not in known:
            if len(known) >= _REMEMBERED:
                known.clear()
            known[look] = _outlook(self.seat.times, self._max_rows, self._planned, demand, behind)
        return known[look]

    @property
    def _max_rows(self) -> int:
        return self.seat.max_rows or 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """When a job's turns would end on a worker, and whether there is a place for it in the group."""

    end_s: float
    opens: bool


# What was taken since the seat was made, the job in question, and those behind it.
_EstimateKey = tuple[tuple[ResourceRequest, ...], ResourceRequest, tuple[ResourceRequest, ...]]


def _outlook(
    times: StepTimes,
    max_rows: int,
    planned: Sequence[ResourceRequest],
    demand: ResourceRequest,
    behind: tuple[ResourceRequest, ...],
) -> _Estimate:
    seconds = cache(_turns(times, demand.shape))
    ahead = _works(planned, demand.shape)
    line = [*ahead, RemainingWork(rows=demand.rows, steps=demand.steps)]
    width = best_width([*line, *_works(behind, demand.shape)], seconds, max_rows=max_rows)
    opens = (
        len(ahead) < width
        or _opening_s(ahead, seconds, width) <= _lead_s(ahead, seconds)
        or _to_try(times, max_rows, [*planned, demand], width)
    )
    return _Estimate(end_s=completion_times(line, seconds, max(1, min(width, len(line))))[-1], opens=opens)


def _to_try(times: StepTimes, max_rows: int, demands: Sequence[ResourceRequest], width: int) -> bool:
    """Whether the worker should have all of `demands`, to measure anew what a turn of them takes.

    Of one shape, as others share no turn. When each of them ends is still reckoned by what was measured last.
    """
    if len(demands) > most_on_trial(width) or len({demand.shape for demand in demands}) > 1:
        return False
    rows = sum(demand.rows for demand in demands)
    return rows <= max_rows and times.outdated(demands[0].shape, rows)


def _turns(times: StepTimes, shape: Shape) -> Callable[[int], float]:
    """Seconds of one turn of that shape, by its rows."""

    def seconds(rows: int) -> float:
        measured = times.seconds(shape, rows)
        return rows * _UNMEASURED_S if measured is None else measured

    return seconds


def _works(demands: Iterable[ResourceRequest], shape: Shape) -> list[RemainingWork]:
    """Demands as rows of one shape: a larger latent counts as more rows."""
    return [RemainingWork(rows=_rows_as(demand, shape), steps=demand.steps) for demand in demands]


def _lead_s(ahead: Sequence[RemainingWork], seconds: Callable[[int], float]) -> float:
    return max(_LEAD_S, _LEAD_TURNS * seconds(sum(work.rows for work in ahead)))


def _opening_s(ahead: Sequence[RemainingWork], seconds: Callable[[int], float], width: int) -> float:
    """Seconds until fewer than `width` of `ahead` are left."""
    return sorted(completion_times(ahead, seconds, len(ahead)))[len(ahead) - width]


def _rows_as(demand: ResourceRequest, shape: Shape) -> int:
    area, of = demand.shape[0] * demand.shape[1], shape[0] * shape[1]
    return max(1, round(demand.rows * area / of)) if area and of else demand.rows


def _assignment(job: PendingJob, offer: _Offer) -> Assignment:
    seat = offer.bench.seat
    return Assignment(
        job_id=job.job_id,
        worker=seat.worker,
        estimate_s=None if _unmeasured(seat) else offer.completes_s,
        alone=offer.bench.empty,
    )


def _unmeasured(seat: WorkerState) -> bool:
    return next(iter(seat.times.entries()), None) is None
