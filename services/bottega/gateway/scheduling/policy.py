"""The scheduling policy: which worker gets which pending job, and when. Pure functions of what is given to them.

Three rules, in the order of `assign`:

1. Ageing. Jobs are considered oldest first, and a younger job never takes what an older one waits for: when no worker
   has slack for a job, the round is over. Only a job that few workers may have waits without holding up the others.
2. Least estimated completion. A job goes to the worker where it is expected to complete first, by measured step times:
   after what runs there, what was planned for it in this round, and what the job has to load there before it begins.
   An edit counts by the part of it that a worker computes: where its template's activations are at hand, that is little
   more than its mask.
3. Slack. A job is bound to its worker as late as possible, so that it may still go to another one: only when the group
   of the worker has a free place, or will have one within the lead time, in which the prompt is encoded. Until then it
   stays in the queue, and the worker's plan counts it in. A job of a tenant that has less than its share of what runs
   is bound to a worker whose group is full, if few are beyond it: the worker's turns are shared.

The engine of a worker forms its groups by the same cost model (bottega.planning).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import ceil
from operator import attrgetter

from bottega.planning import (
    RemainingWork,
    RowFractions,
    Shape,
    StepTimes,
    best_width,
    completion_times,
    most_on_trial,
)

# Pending jobs that are considered in one round; those behind them cannot change who is next. And of these, those that
# are planned at a worker without a place, because they would be done sooner there than where there is one.
_HORIZON = 32
_MOST_UNBOUND = 2
# Pending jobs that are imagined beside the next one, and like it, when the width of a group is chosen.
_LOOK_AHEAD = 4
# The lead time of a job: to encode a prompt and to cross the wire, or one and a half turns, as progress is only known
# at the end of a turn.
_LEAD_S = 0.05
_LEAD_TURNS = 1.5
# Seconds of one row and turn while nothing was measured: proportional, so that nothing shares a worker then.
_UNMEASURED_S = 0.1
# Jobs beyond a full group beside which one of a tenant below its share may still begin: a group that was wider a moment
# ago has some, and a worker serves so many turn by turn.
_BEYOND = 4
# Of many workers those that have least to do are compared; of these, those are looked at closely that would have a job
# done soonest if nothing shared a turn, and the idlest, where a place is likely.
_LEAST_BUSY, _NEAREST, _IDLEST = 16, 4, 2
# Kinds of edits, by what they compute, of which it is found out how many should run together.
_TYPICAL_SHARES = 2
_TYPICAL = 1024
# Turns of one shape of a worker, each of so many rows, of which is remembered what they take until it reports again.
_TURNS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """What a job needs of a worker.

    rows: in each turn. steps: turns to go. shape: of its latent; (0, 0) is unknown. share: of the tokens of its rows,
    what is computed; less than 1 of an edit whose template's activations are at hand.
    """

    rows: int
    steps: int
    shape: Shape
    share: float = 1.0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.rows, self.steps, self.shape, self.share)))

    def __hash__(self) -> int:
        """Kept: what was found out of workers is looked up by it, more than a hundred times in a round."""
        return self._hash


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJob:
    """A job in the queue.

    avoid: a worker that must not have it, because it was just lost with it. exclusive: it may only run by itself,
    because a worker may have died of it. within_share: its tenant has at most its share of what runs, with it, while
    others have jobs too. eligible: the only workers that may have it; None is all of them.
    load_s: seconds that it needs at a worker before its first step, by worker; none where a worker is not named.
    reduced: what it needs of workers of which it needs less than `request`, by worker; see request_at.
    """

    job_id: str
    request: ResourceRequest
    avoid: str = ""
    exclusive: bool = False
    within_share: bool = False
    eligible: frozenset[str] | None = None
    load_s: Mapping[str, float] = field(default_factory=dict)
    reduced: Mapping[str, ResourceRequest] = field(default_factory=dict)

    def request_at(self, worker: str) -> ResourceRequest:
        """What it needs of that worker."""
        return self.reduced.get(worker, self.request)

    def may_run_on(self, worker: str) -> bool:
        """Whether that worker may have it."""
        return worker != self.avoid and (self.eligible is None or worker in self.eligible)


@dataclass(slots=True, kw_only=True)
class Findings:
    """What was already found out of a worker's state, for later rounds, by what was asked.

    widths outlive the state as long as the same jobs run: a step made or two change none of them. What turns take does
    so as long as the worker has not reported: turns, by shape and then by rows; alone, of a job alone its rows, in
    plain ones, and the seconds of a turn, by its rows, shape and share.
    """

    widths: dict[_Question, int] = field(default_factory=dict)
    slack: dict[_Question, bool] = field(default_factory=dict)
    ends_s: dict[_Question, float] = field(default_factory=dict)
    alone: dict[tuple[int, Shape, float], tuple[float, float]] = field(default_factory=dict)
    turns: dict[Shape, Callable[[float], float]] = field(default_factory=dict)
    load_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker at the start of a round.

    running: what still denoises there, first come first. finishing: attempts there that do not denoise any more.
    exclusive: a job there must be left alone. fixed_s: seconds that a job takes beside its turns.
    max_rows: of one turn; 0 is without bound. fractions: what rows cost of which a part is computed.
    findings: go with the state: a worker that has moved, or has reported, gets another one.
    """

    worker: str
    running: tuple[ResourceRequest, ...]
    times: StepTimes
    fixed_s: float
    max_rows: int
    finishing: int = 0
    exclusive: bool = False
    fractions: RowFractions = field(default_factory=RowFractions, compare=False)
    findings: Findings = field(default_factory=Findings, compare=False, repr=False)

    @property
    def most_rows(self) -> int:
        """Of one turn."""
        return self.max_rows or 1 << 30

    def turn_seconds(self, shape: Shape) -> Callable[[float], float]:
        """Seconds of one turn of that shape, by its rows."""
        seconds = self.findings.turns.get(shape)
        if seconds is None:
            seconds = self.findings.turns[shape] = _turn_seconds(self.times, shape)
        return seconds

    def alone(self, request: ResourceRequest) -> tuple[float, float]:
        """What the rows of one job cost, in plain ones, and the seconds of a turn with nothing else."""
        kind, known = (request.rows, request.shape, request.share), self.findings.alone
        found = known.get(kind)
        if found is None:
            rows = float(request.rows)
            if request.share < 1.0:
                rows *= self.fractions.fraction(request.shape, request.share)
            found = known[kind] = rows, self.turn_seconds(request.shape)(rows)
        return found

    @property
    def unmeasured(self) -> bool:
        """Whether it has measured no step yet."""
        return next(iter(self.times.entries()), None) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A worker should get a job now. estimate_s: until it completes, loads included; None while nothing was measured.

    exclusive: whether the worker has nothing else.
    """

    job_id: str
    worker: str
    estimate_s: float | None
    exclusive: bool = False


def assign(
    pending: Iterable[PendingJob], workers: Sequence[WorkerState], *, contended: bool = False
) -> list[Assignment]:
    """Which of the pending jobs, oldest first, leave the queue now. Looks at no more of them than it must.

    An exclusive job takes an idle worker, else one is drained for it: never more than one at a time, so that the others
    go on. contended: several tenants have jobs: behind one that no worker has a place for there may be one within its
    tenant's share.
    """
    if not workers:
        return []
    plans = [WorkerPlan(worker) for worker in workers]
    assignments: list[Assignment] = []
    unbound, blocked = 0, False
    rest = iter(pending)
    line = deque(islice(rest, 1 + _LOOK_AHEAD))
    for _ in range(_HORIZON):
        if not line or unbound > _MOST_UNBOUND:
            break
        job = line.popleft()
        behind = sum(not other.exclusive for other in line)
        line.extend(islice(rest, 1))
        if blocked and not job.within_share:
            continue
        anywhere = not job.avoid and job.eligible is None
        candidates = plans if anywhere else [plan for plan in plans if job.may_run_on(plan.state.worker)]
        if job.exclusive:
            candidates = _idle_or_drained(candidates, plans)
        options = [_Option(job, plan, behind) for plan in _shortlist(job, candidates)]
        if not options:
            continue
        if job.eligible is None and not any(option.has_slack for option in options):
            if not contended:
                break
            blocked = True
            continue
        best = min(options, key=lambda option: option.completes_s)
        if best.has_slack:
            assignments.append(best.assignment())
        unbound += not best.has_slack
        best.plan.add(best.request, bound=best.has_slack)
        best.plan.closed = job.exclusive
    return assignments


def _shortlist(job: PendingJob, candidates: Iterable[WorkerPlan]) -> list[WorkerPlan]:
    """Those of the workers that are looked at closely."""
    plans = [plan for plan in candidates if not plan.closed]
    if len(plans) <= _NEAREST + _IDLEST:
        return plans

    whole, reduced, loads = _typical(job.request), job.reduced, job.load_s

    def at_most_s(plan: WorkerPlan) -> float:
        worker = plan.state.worker
        request = _typical(reduced[worker]) if worker in reduced else whole
        return plan.load_s + plan.alone_s(request) + loads.get(worker, 0.0)

    least_busy = sorted(plans, key=_LOAD_S)[:_LEAST_BUSY]
    nearest = sorted(least_busy, key=at_most_s)[:_NEAREST]
    return nearest + [plan for plan in least_busy if plan not in nearest][:_IDLEST]


_LOAD_S = attrgetter("load_s")


def _idle_or_drained(candidates: list[WorkerPlan], plans: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    """Where an exclusive job may go now. Where that is nowhere, closes the worker that will be idle first."""
    idle = [plan for plan in candidates if plan.empty]
    if not idle and candidates and not any(plan.closed for plan in plans):
        min(candidates, key=lambda plan: plan.load_s).closed = True
    return idle


class _Option:
    """A job at a worker. behind: as many jobs wait behind it.

    request: what it needs there. has_slack: whether the worker has a place for it now.
    """

    __slots__ = ("_behind", "_load_s", "has_slack", "job", "plan", "request")

    def __init__(self, job: PendingJob, plan: WorkerPlan, behind: int) -> None:
        worker = plan.state.worker
        self.job, self.plan, self._behind = job, plan, behind
        self.request = job.request_at(worker)
        self.has_slack = plan.has_slack(self.request, behind, within_share=job.within_share)
        self._load_s = job.load_s.get(worker, 0.0)

    @property
    def completes_s(self) -> float:
        """When it would complete."""
        return self.plan.completes_s(self.request, self._behind) + self._load_s

    def assignment(self) -> Assignment:
        """It is the one."""
        state = self.plan.state
        return Assignment(
            job_id=self.job.job_id,
            worker=state.worker,
            estimate_s=None if state.unmeasured else self.completes_s,
            exclusive=self.plan.empty,
        )


class WorkerPlan:
    """A worker with what it runs, what it was given in this round, and what was planned for it.

    load_s: seconds that what is here takes, one after the other. closed: whether it gets nothing more.
    """

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        found = state.findings
        if found.load_s is None:
            found.load_s = sum(self.alone_s(request) for request in state.running)
        self.load_s = found.load_s
        self.closed = state.exclusive
        self._has_unbound = False
        self._added: tuple[ResourceRequest, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing runs here, nor is planned."""
        return not self.state.running and not self._added and not self.state.finishing

    def alone_s(self, request: ResourceRequest) -> float:
        """Seconds of the turns of one job, alone."""
        return self.state.alone(request)[1] * request.steps

    def has_slack(self, request: ResourceRequest, behind: int, *, within_share: bool = False) -> bool:
        """Whether a job may begin here now. Nobody overtakes one that is planned here and not bound yet.

        within_share: whether its tenant has at most its share of what runs.
        """
        if self._has_unbound:
            return False
        typical = _typical(request)
        if within_share and len(self._planned) <= self._width(typical, behind) + _BEYOND:
            return True
        question, known = (self._added, typical, behind), self.state.findings.slack
        if question not in known:
            known[question] = _has_slack(self.state, self._planned, typical, self._width(typical, behind))
        return known[question]

    def completes_s(self, request: ResourceRequest, behind: int) -> float:
        """Seconds until a job would complete here, what it has to load aside."""
        question, known = (self._added, request, behind), self.state.findings.ends_s
        if question not in known:
            line = _works([*self._planned, request], request.shape, self.state)
            width = max(1, min(self._width(_typical(request), behind), len(line)))
            known[question] = completion_times(line, self.state.turn_seconds(request.shape), width)[-1]
        return known[question] + self.state.fixed_s

    def add(self, request: ResourceRequest, *, bound: bool) -> None:
        """Counts a job in. bound: whether the worker gets it now."""
        self._added = (*self._added, request)
        self.load_s += self.alone_s(request)
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
        works, seconds = _works(planned, shape, self.state), self.state.turn_seconds(shape)
        width = best_width(works[: 2 * _LOOK_AHEAD], seconds, max_rows=self.state.most_rows)
        return completion_times(works, seconds, max(1, width))

    @property
    def _planned(self) -> list[ResourceRequest]:
        return [*self.state.running, *self._added]

    def _width(self, request: ResourceRequest, behind: int) -> int:
        """How many should run together here, a typical job and some like it behind it among them."""
        question, known = (self._added, request, behind), self.state.findings.widths
        if question not in known:
            works = _works([*self._planned, *[request] * (1 + behind)], request.shape, self.state)
            seconds = self.state.turn_seconds(request.shape)
            known[question] = best_width(works, seconds, max_rows=self.state.most_rows)
        return known[question]


# What was added since the state was made, the job in question, and how many are behind it.
_Question = tuple[tuple[ResourceRequest, ...], ResourceRequest, int]


@lru_cache(_TYPICAL)
def _typical(request: ResourceRequest) -> ResourceRequest:
    """A request like this one, of few kinds: how many should run together depends but little on what they compute."""
    return replace(request, share=ceil(request.share * _TYPICAL_SHARES) / _TYPICAL_SHARES)


def _has_slack(state: WorkerState, planned: Sequence[ResourceRequest], request: ResourceRequest, width: int) -> bool:
    """Whether a group of that width has a place for a job, will have one within the lead time, or should be tried."""
    if len(planned) < width:
        return True
    seconds = state.turn_seconds(request.shape)
    ahead = _works(planned, request.shape, state)
    soon_free = _place_free_s(ahead, seconds, width) <= _lead_s(ahead, seconds)
    return soon_free or _worth_a_trial(state, [*planned, request], width)


def _worth_a_trial(state: WorkerState, requests: Sequence[ResourceRequest], width: int) -> bool:
    """Whether the worker should have all of `requests`, to measure anew what a turn of them takes.

    Of one shape, as others share no turn, and computed in full: only such rows measure anything. When each of them ends
    is still estimated by what was measured last.
    """
    if len(requests) > most_on_trial(width) or len({(request.shape, request.share) for request in requests}) > 1:
        return False
    rows = sum(request.rows for request in requests)
    in_full = requests[0].share >= 1.0
    return in_full and rows <= state.most_rows and state.times.outdated(requests[0].shape, rows)


def _turn_seconds(times: StepTimes, shape: Shape) -> Callable[[float], float]:
    """Looked up once for each number of rows: one choice of a width asks for the same ones many times."""

    @lru_cache(_TURNS)
    def seconds(rows: float) -> float:
        measured = times.seconds(shape, rows)
        return rows * _UNMEASURED_S if measured is None else measured

    return seconds


def _works(requests: Iterable[ResourceRequest], shape: Shape, state: WorkerState) -> list[RemainingWork]:
    """Requests as plain rows of one shape: a larger latent counts as more rows, an edit as fewer."""
    return [RemainingWork(rows=_rows_as(request, shape, state), steps=request.steps) for request in requests]


def _lead_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float]) -> float:
    return max(_LEAD_S, _LEAD_TURNS * seconds(sum(work.rows for work in ahead)))


def _place_free_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> float:
    """Seconds until fewer than `width` of `ahead` are left."""
    return sorted(completion_times(ahead, seconds, len(ahead)))[len(ahead) - width]


def _rows_as(request: ResourceRequest, shape: Shape, state: WorkerState) -> float:
    rows = state.alone(request)[0]
    if request.shape == shape:
        return rows
    area, of = request.shape[0] * request.shape[1], shape[0] * shape[1]
    return rows * area / of if area and of else rows
