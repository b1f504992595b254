"""The scheduling policy's model of workers: the jobs of each, and when it would complete one more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, inf
from typing import NamedTuple

from bottega.planning import (
    RemainingWork,
    RowFractions,
    Shape,
    StepTimes,
    best_width,
    completion_times,
    most_on_trial,
)

# Seconds of one row and turn while nothing was measured. They are proportional to rows, so that sharing gains nothing.
UNMEASURED_S = 0.1
# Pending jobs like the next one that are imagined behind it when the width of a group is chosen.
LOOK_AHEAD = 4
# Numbers of rows of one shape whose turn times are remembered until a worker reports again.
_TURNS = 1024
# The lead time of a job is the longer of two: the time to encode a prompt and cross the wire, and one and a half turns,
# because progress is known only at the end of a turn.
_LEAD_S = 0.05
_LEAD_TURNS = 1.5
# Jobs beyond a full group beside which one of a tenant below its share may still begin: a group that was wider a moment
# ago has some, and a worker serves that many turn by turn.
_BEYOND = 4
# Upper bound on what a job adds to the turns of others, as a share of its own turns alone, where running them together
# pays. On a CPU, where each row costs nearly as much as the one before, it is .9. Turns of few rows are measured at
# other times than turns of many, so it can seem to be less.
_GAINING = 0.5
# Kinds of edits, by their computed share, for which widths are chosen.
_TYPICAL_SHARES = 2
_TYPICAL = 1024


class ResourceRequest(NamedTuple):
    """The resources that a job needs of a worker. It is a tuple because it is a key of caches in the hot path."""

    rows: int
    """Rows in each turn."""
    steps: int
    """Turns that are left."""
    shape: Shape
    """Height and width of its latent; (0, 0) is unknown."""
    share: float = 1.0
    """Share of its rows' tokens that is computed; below 1 for an edit that reuses recorded activations."""
    slowdown: float = 1.0
    """How many times as long its turns take because of its ControlNets and LoRAs."""


Question = tuple[tuple[ResourceRequest, ...], ResourceRequest, int]
"""What was added since the state was made, the job in question, and how many are behind it or may run together."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """A cache of results computed from a worker's state, which later rounds reuse."""

    widths: dict[Question, int] = field(default_factory=dict)
    """Widths of groups. They outlive the state while the same jobs run: a step or two changes none of them."""
    slack: dict[Question, bool] = field(default_factory=dict)
    ends_s: dict[Question, float] = field(default_factory=dict)
    alone: dict[tuple[int, Shape, float], tuple[float, float]] = field(default_factory=dict)
    """Plain rows of a job, and the seconds of its turn alone; by rows, shape and share. Cleared at each report."""
    turns: dict[Shape, Callable[[float], float]] = field(default_factory=dict)
    """Seconds of a turn as a function of its rows, by shape. Cleared at each report."""
    load_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker at the start of a round."""

    worker: str
    """Name of the worker."""
    running: tuple[ResourceRequest, ...]
    """Jobs that still denoise there, in order of arrival."""
    times: StepTimes
    fixed_s: float
    """Seconds that a job takes outside its denoising turns."""
    max_rows: int
    """Upper bound on the rows of a turn; 0 means no bound."""
    due_s: tuple[float, ...] = ()
    """Seconds until each running job is due when the state was made, infinite for one that is not; empty if none is."""
    finishing: int = 0
    """Number of attempts there that no longer denoise."""
    exclusive: bool = False
    """Whether a job there runs exclusively, so that no other may join it."""
    fractions: RowFractions = field(default_factory=RowFractions, compare=False)
    """Costs of rows that are computed in part."""
    findings: Findings = field(default_factory=Findings, compare=False, repr=False)
    """Cached results for this state; replaced when the worker's jobs or its report change."""

    @property
    def row_limit(self) -> int:
        """Upper bound on the rows of a turn."""
        return self.max_rows or 1 << 30

    def turn_seconds(self, shape: Shape) -> Callable[[float], float]:
        """Return the seconds of a turn of that shape as a function of its rows."""
        seconds = self.findings.turns.get(shape)
        if seconds is None:
            seconds = self.findings.turns[shape] = _turn_seconds(self.times, shape)
        return seconds

    def work(self, request: ResourceRequest, shape: Shape) -> RemainingWork:
        """Return a job as plain rows of one shape: a larger latent counts as more rows, an edit as fewer."""
        rows = self.alone(request)[0]
        if request.shape != shape:
            rows *= _area_ratio(request.shape, shape)
        # As more turns, not as more rows: others wait no longer in each.
        return RemainingWork(ceil(request.steps * request.slowdown), rows)

    def alone(self, request: ResourceRequest) -> tuple[float, float]:
        """Return a job's rows in plain rows, and the seconds of its turn alone and without add-ons."""
        rows, shape, share = request.rows, request.shape, request.share
        known = self.findings.alone
        found = known.get((rows, shape, share))
        if found is None:
            plain = float(rows)
            if share < 1.0:
                plain *= self.fractions.fraction(shape, share)
            found = known[rows, shape, share] = plain, self.turn_seconds(shape)(plain)
        return found

    def alone_s(self, request: ResourceRequest) -> float:
        """Return the seconds of a job's turns alone."""
        return self.alone(request)[1] * request.steps * request.slowdown

    @property
    def unmeasured(self) -> bool:
        """Whether the worker has measured no step yet."""
        return next(iter(self.times.entries()), None) is None


class WorkerPlan:
    """The plan of a worker in one round of scheduling: its running, assigned and planned jobs.

    Attributes:
        load_s: Seconds that these jobs take, one after the other.
        closed: Whether the worker gets no more jobs.
    """

    __slots__ = ("_added", "_added_due_s", "_has_unbound", "closed", "load_s", "state")

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        found = state.findings
        if found.load_s is None:
            found.load_s = sum(state.alone_s(request) for request in state.running)
        self.load_s = found.load_s
        self.closed = state.exclusive
        self._has_unbound = False
        self._added: tuple[ResourceRequest, ...] = ()
        self._added_due_s: tuple[float, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing runs or is planned here."""
        return not self.state.running and not self._added and not self.state.finishing

    def has_slack(
        self, request: ResourceRequest, behind: int, *, within_share: bool = False, none_runs: bool = False
    ) -> bool:
        """Return whether a job may begin here now. It must not overtake a job that is planned here but not bound.

        Args:
            request: What it needs.
            behind: How many jobs wait behind it.
            within_share: Whether its tenant has at most its share of what runs.
            none_runs: Whether none of its tenant's jobs runs. Then it may join any number of other tenants' jobs.
        """
        if within_share and none_runs:
            return True
        if self._has_unbound:
            return False
        typical = as_typical(request)
        if within_share and len(self._planned) <= self._width(typical, behind) + _BEYOND:
            return True
        width = self._free_width(request, behind)
        question, known = (self._added, typical, width), self.state.findings.slack
        if question not in known:
            known[question] = _has_slack(self.state, self._planned, typical, width)
        return known[question]

    def completes_s(self, request: ResourceRequest, behind: int) -> float:
        """Return the seconds until a job would complete here, without the time to load its add-ons."""
        width = self._free_width(request, behind)
        question, known = (self._added, request, width), self.state.findings.ends_s
        if question not in known:
            line = _works([*self._planned, request], request.shape, self.state)
            width = max(1, min(width, len(line)))
            known[question] = completion_times(line, self.state.turn_seconds(request.shape), width)[-1]
        return known[question] + self.state.fixed_s

    def add(self, request: ResourceRequest, *, bound: bool, due_s: float = inf) -> None:
        """Add a job to the plan.

        Args:
            request: What it needs.
            bound: Whether the worker gets it now.
            due_s: Seconds until it is due.
        """
        self._added = (*self._added, request)
        self._added_due_s = (*self._added_due_s, due_s)
        self.load_s += self.state.alone_s(request)
        self._has_unbound = self._has_unbound or not bound

    def unmeasured(self, request: ResourceRequest) -> bool:
        """Return whether no turn of the request's shape was measured yet."""
        return self.state.times.seconds(request.shape, request.rows) is None

    def completions_s(self, *more: ResourceRequest) -> list[float]:
        """Return when each job here ends, in order of arrival, and then each of `more` if they came now."""
        planned = [*self._planned, *more]
        if not planned:
            return []
        shape = planned[-1].shape
        works, seconds = _works(planned, shape, self.state), self.state.turn_seconds(shape)
        width = best_width(works[: 2 * LOOK_AHEAD], seconds, max_rows=self.state.row_limit)
        running, due_s = self.state.running, self.state.due_s
        few_wait = 0 < len(planned) - len(running) <= LOOK_AHEAD
        if width > len(running) and few_wait and _makes_late(self.state, running, due_s, planned[len(running)]):
            width = len(running)
        return completion_times(works, seconds, max(1, width))

    @property
    def _planned(self) -> list[ResourceRequest]:
        return [*self.state.running, *self._added]

    def _free_width(self, request: ResourceRequest, behind: int) -> int:
        """Return how many jobs may run together here: no more than now if one more would make one of them late.

        If many jobs wait, a wider group is used all the same: even a small saving per turn helps all that wait.
        """
        width, here = self._width(as_typical(request), behind), len(self._planned)
        return here if here < width and behind < LOOK_AHEAD and self._makes_late(request) else width

    def _makes_late(self, request: ResourceRequest) -> bool:
        due_s = [*(self.state.due_s or [inf] * len(self.state.running)), *self._added_due_s]
        return _makes_late(self.state, self._planned, due_s, request)

    def _width(self, request: ResourceRequest, behind: int) -> int:
        """Return how many jobs should run together here, a typical job and some like it behind it among them."""
        question, known = (self._added, request, behind), self.state.findings.widths
        if question not in known:
            works = _works([*self._planned, *[request] * (1 + behind)], request.shape, self.state)
            seconds = self.state.turn_seconds(request.shape)
            known[question] = best_width(works, seconds, max_rows=self.state.row_limit)
        return known[question]


@lru_cache(_TYPICAL)
def as_typical(request: ResourceRequest) -> ResourceRequest:
    """Return a request like this one with a rounded share: widths depend little on what edits compute."""
    return request._replace(share=ceil(request.share * _TYPICAL_SHARES) / _TYPICAL_SHARES)


def _makes_late(
    state: WorkerState, here: Sequence[ResourceRequest], due_s: Sequence[float], request: ResourceRequest
) -> bool:
    """Return whether one of the jobs that are here would end after it is due if another one began beside them.

    A job that adds much less to a turn than it takes alone makes none late: all gain by sharing the turn.

    Args:
        state: State of the worker.
        here: Jobs that are here.
        due_s: Seconds until each of them is due.
        request: What the other job needs.
    """
    if min(due_s, default=inf) == inf:
        return False
    line, seconds = _works([*here, request], request.shape, state), state.turn_seconds(request.shape)
    rows, own = sum(work.rows for work in line), line[-1].rows
    if seconds(rows) - seconds(rows - own) <= _GAINING * seconds(own):
        return False
    ends_s = completion_times(line, seconds, len(line))
    return any(end_s + state.fixed_s > due for end_s, due in zip(ends_s, due_s, strict=False))


def _has_slack(state: WorkerState, planned: Sequence[ResourceRequest], request: ResourceRequest, width: int) -> bool:
    """Return whether a group of that width has a free place, will soon have one, or should be tried once."""
    if len(planned) < width:
        return True
    seconds = state.turn_seconds(request.shape)
    ahead = _works(planned, request.shape, state)
    soon_free = _place_free_s(ahead, seconds, width) <= _lead_s(ahead, seconds)
    return soon_free or _worth_a_trial(state, [*planned, request], width)


def _worth_a_trial(state: WorkerState, requests: Sequence[ResourceRequest], width: int) -> bool:
    """Return whether the worker should have all of `requests` to measure a turn of them anew.

    Requests of different shapes share no turn, and only rows that are computed in full give a measurement. Estimates
    of when each request ends still use the last measurement.
    """
    if len(requests) > most_on_trial(width) or len({(request.shape, request.share) for request in requests}) > 1:
        return False
    rows = sum(request.rows for request in requests)
    in_full = requests[0].share >= 1.0
    return in_full and rows <= state.row_limit and state.times.outdated(requests[0].shape, rows)


def _works(requests: Iterable[ResourceRequest], shape: Shape, state: WorkerState) -> list[RemainingWork]:
    return [state.work(request, shape) for request in requests]


def _lead_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float]) -> float:
    return max(_LEAD_S, _LEAD_TURNS * seconds(sum(work.rows for work in ahead)))


def _place_free_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> float:
    """Return the seconds until fewer than `width` of the jobs in `ahead`, which run together, are left."""
    clock, turn = 0.0, 0
    rows = sum(work.rows for work in ahead)
    for steps, ended_rows in sorted(ahead)[: len(ahead) - width + 1]:
        if steps > turn:
            clock += (steps - turn) * seconds(rows)
            turn = steps
        rows -= ended_rows
    return clock


def _area_ratio(shape: Shape, other: Shape) -> float:
    """Return the ratio of two latents' areas; 1 if one is unknown."""
    area, other_area = shape[0] * shape[1], other[0] * other[1]
    return area / other_area if area and other_area else 1.0


def _turn_seconds(times: StepTimes, shape: Shape) -> Callable[[float], float]:
    """Return a cached function from rows to seconds: choosing one width asks for the same rows many times."""

    @lru_cache(_TURNS)
    def seconds(rows: float) -> float:
        measured = times.seconds(shape, rows)
        return rows * UNMEASURED_S if measured is None else measured

    return seconds
