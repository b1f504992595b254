"""The scheduling policy: which worker gets which pending job, and when. Pure functions of what is given to them.

Three rules, in the order of `assign`:

1. Ageing. Jobs are considered oldest first, and a younger job never takes what an older one waits for: when no worker
   has slack for a job, the round is over. Only a job that few workers may have waits without holding up the others.
2. Least estimated completion. A job goes to the worker where it is expected to complete first, by measured step times:
   after what runs there, what was planned for it in this round, and what the job has to load there before it begins.
3. Slack. A job is bound to its worker as late as possible, so that it may still go to another one: only when the group
   of the worker has a free place, or will have one within the lead time, in which the prompt is encoded. Until then it
   stays in the queue, and the worker's plan counts it in.

The engine of a worker forms its groups by the same cost model (bottega.planning).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice

from bottega.planning import RemainingWork, Shape, StepTimes, best_width, completion_times, most_on_trial

# Pending jobs that are considered in one round; those behind them cannot change who is next.
_HORIZON = 32
# Pending jobs that are imagined beside the next one when the width of a group is chosen.
_LOOK_AHEAD = 4
# The lead time of a job: to encode a prompt and to cross the wire, or one and a half turns, as progress is only known
# at the end of a turn.
_LEAD_S = 0.05
_LEAD_TURNS = 1.5
# Seconds of one row and turn while nothing was measured: proportional, so that nothing shares a worker then.
_UNMEASURED_S = 0.1
# Estimates that a worker's state remembers: of the next jobs of a queue, each with what is behind it.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What a job needs of a worker. rows: in each turn. steps: turns to go. shape: of its latent; (0, 0) is unknown."""

    rows: int
    steps: int
    shape: Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJob:
    """A job in the queue.

    avoid: a worker that must not have it, because it was just lost with it. exclusive: it may only run by itself,
    because a worker may have died of it. eligible: the only workers that may have it; None is all of them.
    load_s: seconds that it needs at a worker before its first step, by worker; none where a worker is not named.
    """

    job_id: str
    request: ResourceRequest
    avoid: str = ""
    exclusive: bool = False
    eligible: frozenset[str] | None = None
    load_s: Mapping[str, float] = field(default_factory=dict)

    def may_run_on(self, worker: str) -> bool:
        """Whether that worker may have it."""
        return worker != self.avoid and (self.eligible is None or worker in self.eligible)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker at the start of a round.

    running: what still denoises there, first come first. finishing: attempts there that do not denoise any more.
    exclusive: a job there must be left alone. fixed_s: seconds that a job takes beside its turns.
    max_rows: of one turn; 0 is without bound.
    estimates: those already made for this state, for the next round. They go with it: a worker that has moved, or has
        reported, gets another state.
    """

    worker: str
    running: tuple[ResourceRequest, ...]
    times: StepTimes
    fixed_s: float
    max_rows: int
    finishing: int = 0
    exclusive: bool = False
    estimates: dict[_EstimateKey, _Estimate] = field(default_factory=dict, compare=False, repr=False)

    @property
    def unmeasured(self) -> bool:
        """Whether it has measured no step yet."""
        return next(iter(self.times.entries()), None) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A worker should get a job now. estimate_s: until it completes; None while nothing was measured.

    exclusive: whether the worker has nothing else.
    """

    job_id: str
    worker: str
    estimate_s: float | None
    exclusive: bool = False


def assign(pending: Iterable[PendingJob], workers: Sequence[WorkerState]) -> list[Assignment]:
    """Which of the pending jobs, oldest first, leave the queue now. Looks at no more of them than it must.

    An exclusive job takes an idle worker, else one is drained for it: never more than one at a time, so that the others
    go on.
    """
    if not workers:
        return []
    plans = [WorkerPlan(worker) for worker in workers]
    assignments: list[Assignment] = []
    rest = iter(pending)
    line = deque(islice(rest, 1 + _LOOK_AHEAD))
    for _ in range(_HORIZON):
        if not line:
            break
        job = line.popleft()
        behind = tuple(other.request for other in line if not other.exclusive)
        line.extend(islice(rest, 1))
        candidates = [plan for plan in plans if job.may_run_on(plan.state.worker)]
        if job.exclusive:
            candidates = _idle_or_drained(candidates, plans)
        options = [plan.option(job.request, behind) for plan in candidates if not plan.closed]
        if not options:
            continue
        if job.eligible is None and not any(option.has_slack for option in options):
            break
        best = _least_estimated_completion(job, options)
        if best.has_slack:
            assignments.append(_assignment(job, best))
        best.plan.add(job.request, bound=best.has_slack)
        best.plan.closed = job.exclusive
    return assignments


def _least_estimated_completion(job: PendingJob, options: Iterable[_Option]) -> _Option:
    return min(options, key=lambda option: option.completes_s + job.load_s.get(option.plan.state.worker, 0.0))


def _idle_or_drained(candidates: list[WorkerPlan], plans: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    """Where an exclusive job may go now. Where that is nowhere, closes the worker that will be idle first."""
    idle = [plan for plan in candidates if plan.empty]
    if not idle and candidates and not any(plan.closed for plan in plans):
        min(candidates, key=lambda plan: plan.load_s).closed = True
    return idle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """A job at a worker: when it would complete, and whether the worker has slack for it now."""

    plan: WorkerPlan
    completes_s: float
    has_slack: bool


class WorkerPlan:
    """A worker with what it runs, what it was given in this round, and what was planned for it."""

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        self.closed = state.exclusive
        self._has_unbound = False
        self._planned = list(state.running)

    @property
    def empty(self) -> bool:
        """Whether nothing runs here, nor is planned."""
        return not self._planned and not self.state.finishing

    @property
    def load_s(self) -> float:
        """Seconds that what is here takes, one after the other."""
        return sum(self.alone_s(request) for request in self._planned)

    def alone_s(self, request: ResourceRequest) -> float:
        """Seconds of the turns of one job, alone."""
        return _turn_seconds(self.state.times, request.shape)(request.rows) * request.steps

    def option(self, request: ResourceRequest, behind: tuple[ResourceRequest, ...]) -> _Option:
        """What it would be to run a job here. Nobody overtakes a job that is planned here and not bound yet."""
        estimate = self._estimate(request, behind)
        completes_s = estimate.end_s + self.state.fixed_s
        return _Option(plan=self, completes_s=completes_s, has_slack=estimate.has_slack and not self._has_unbound)

    def add(self, request: ResourceRequest, *, bound: bool) -> None:
        """Counts a job in. bound: whether the worker gets it now."""
        self._planned.append(request)
        self._has_unbound = self._has_unbound or not bound

    def unmeasured(self, request: ResourceRequest) -> bool:
        """Whether nothing is known of turns of that shape."""
        return self.state.times.seconds(request.shape, request.rows) is None

    def completions_s(self, *more: ResourceRequest) -> list[float]:
        """When each of the jobs here ends, first come first, and then each of `more`, if they came as well."""
        planned = [*self._planned, *more]
        if not planned:
            return []
        shape = planned[-1].shape
        works, seconds = _works(planned, shape), cache(_turn_seconds(self.state.times, shape))
        width = best_width(works[: 2 * _LOOK_AHEAD], seconds, max_rows=self._max_rows)
        return completion_times(works, seconds, max(1, width))

    def _estimate(self, request: ResourceRequest, behind: tuple[ResourceRequest, ...]) -> _Estimate:
        known, added = self.state.estimates, tuple(self._planned[len(self.state.running) :])
        key = (added, request, behind)
        if key not in known:
            if len(known) >= _REMEMBERED:
                known.clear()
            known[key] = _estimate(self.state.times, self._max_rows, self._planned, request, behind)
        return known[key]

    @property
    def _max_rows(self) -> int:
        return self.state.max_rows or 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """When a job's turns would end on a worker, and whether the worker's group has a place for it."""

    end_s: float
    has_slack: bool


# What was added since the state was made, the job in question, and those behind it.
_EstimateKey = tuple[tuple[ResourceRequest, ...], ResourceRequest, tuple[ResourceRequest, ...]]


def _estimate(
    times: StepTimes,
    max_rows: int,
    planned: Sequence[ResourceRequest],
    request: ResourceRequest,
    behind: tuple[ResourceRequest, ...],
) -> _Estimate:
    seconds = cache(_turn_seconds(times, request.shape))
    ahead = _works(planned, request.shape)
    line = [*ahead, RemainingWork(rows=request.rows, steps=request.steps)]
    width = best_width([*line, *_works(behind, request.shape)], seconds, max_rows=max_rows)
    has_slack = (
        len(ahead) < width
        or _place_free_s(ahead, seconds, width) <= _lead_s(ahead, seconds)
        or _worth_a_trial(times, max_rows, [*planned, request], width)
    )
    return _Estimate(end_s=completion_times(line, seconds, max(1, min(width, len(line))))[-1], has_slack=has_slack)


def _worth_a_trial(times: StepTimes, max_rows: int, requests: Sequence[ResourceRequest], width: int) -> bool:
    """Whether the worker should have all of `requests`, to measure anew what a turn of them takes.

    Of one shape, as others share no turn. When each of them ends is still estimated by what was measured last.
    """
    if len(requests) > most_on_trial(width) or len({request.shape for request in requests}) > 1:
        return False
    rows = sum(request.rows for request in requests)
    return rows <= max_rows and times.outdated(requests[0].shape, rows)


def _turn_seconds(times: StepTimes, shape: Shape) -> Callable[[float], float]:
    """Seconds of one turn of that shape, by its rows."""

    def seconds(rows: float) -> float:
        measured = times.seconds(shape, rows)
        return rows * _UNMEASURED_S if measured is None else measured

    return seconds


def _works(requests: Iterable[ResourceRequest], shape: Shape) -> list[RemainingWork]:
    """Requests as rows of one shape: a larger latent counts as more rows."""
    return [RemainingWork(rows=_rows_as(request, shape), steps=request.steps) for request in requests]


def _lead_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float]) -> float:
    return max(_LEAD_S, _LEAD_TURNS * seconds(sum(work.rows for work in ahead)))


def _place_free_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> float:
    """Seconds until fewer than `width` of `ahead` are left."""
    return sorted(completion_times(ahead, seconds, len(ahead)))[len(ahead) - width]


def _rows_as(request: ResourceRequest, shape: Shape) -> int:
    area, of = request.shape[0] * request.shape[1], shape[0] * shape[1]
    return max(1, round(request.rows * area / of)) if area and of else request.rows


def _assignment(job: PendingJob, option: _Option) -> Assignment:
    state = option.plan.state
    return Assignment(
        job_id=job.job_id,
        worker=state.worker,
        estimate_s=None if state.unmeasured else option.completes_s,
        exclusive=option.plan.empty,
    )
