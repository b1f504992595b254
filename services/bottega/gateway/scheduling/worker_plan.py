"""The scheduling policy's model of a worker: its jobs, and when it would complete one more.

Here a turn is one forward pass of a worker's batch, a row is one batch row of a job (a guided image has two), and the
width of a batch is its number of jobs.
"""

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
    relative_area,
)

# Seconds of a turn per row until one is measured. They are proportional to rows, so that sharing a turn gains nothing.
UNMEASURED_S = 0.1
# Number of pending jobs like the next one that are assumed behind it when the width of a batch is chosen.
LOOK_AHEAD = 4
# Number of row counts of one shape whose turn times are cached until a worker reports again.
_TURNS = 1024
# The lead time of a job is the longer of two: the time to encode a prompt and cross the wire, and one and a half turns,
# because progress is known only at the end of a turn.
_LEAD_S = 0.05
_LEAD_TURNS = 1.5
# Number of jobs beyond a full batch beside which a tenant below its share may start one more: a batch that was wider
# a moment ago has some, and a worker alternates between that many.
_BEYOND = 4
# Upper bound on what a job adds to the turns of others, as a share of its own turns alone, where running them together
# pays. On a CPU, where each row costs nearly as much as the one before, it is .9. Turns of few rows are measured at
# other times than turns of many, so it can seem to be less.
_GAINING = 0.5
# Number of values to which the computed share of an edit is rounded when widths are chosen.
_TYPICAL_SHARES = 2
_TYPICAL = 1024


class ResourceRequest(NamedTuple):
    """The resources that a job needs of a worker. It is a tuple because it is a key of frequently used caches."""

    rows: int
    """Batch rows in each forward pass."""
    steps: int
    """Steps that are left."""
    shape: Shape
    """Height and width of its latent; (0, 0) if unknown."""
    share: float = 1.0
    """Share of the tokens of its rows that is computed; below 1 for an edit that reuses recorded activations."""
    slowdown: float = 1.0
    """How many times as long its forward passes take alone because of its ControlNets and LoRAs."""


Question = tuple[tuple[ResourceRequest, ...], ResourceRequest, int]
"""Cache key: requests added to the plan, the request in question, and how many jobs wait or may run together."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """A cache of values computed from a worker's state, for later rounds."""

    widths: dict[Question, int] = field(default_factory=dict)
    """Best batch widths. They are kept while the same jobs run, because a step or two changes none of them."""
    slack: dict[Question, bool] = field(default_factory=dict)
    ends_s: dict[Question, float] = field(default_factory=dict)
    alone: dict[tuple[int, Shape, float], tuple[float, float]] = field(default_factory=dict)
    """Cached results of `WorkerState.alone`, by number of rows, latent shape and share of tokens.

    Each report of the worker clears the cache.
    """
    turns: dict[Shape, Callable[[float], float]] = field(default_factory=dict)
    """Functions from rows to the seconds of a turn, by latent shape. Cleared at each report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """The state of a worker at the start of a round."""

    worker: str
    """Name of the worker."""
    running: tuple[ResourceRequest, ...]
    """Jobs that still denoise on the worker, in order of arrival."""
    times: StepTimes
    fixed_s: float
    """Seconds that a job takes besides its denoising steps."""
    max_rows: int
    """Upper bound on the rows of a turn; 0 means no bound."""
    due_s: tuple[float, ...] = ()
    """Seconds until each running job is due, from when the state was computed; inf if never. Empty means all inf."""
    finishing: int = 0
    """Number of attempts on the worker that no longer denoise."""
    exclusive: bool = False
    """Whether a job runs exclusively on the worker, so that no other may join it."""
    fractions: RowFractions = field(default_factory=RowFractions, compare=False)
    """Measured costs of rows of which only a share is computed."""
    findings: Findings = field(default_factory=Findings, compare=False, repr=False)
    """Cached values for this state; replaced when the worker's jobs or its report change."""
    load_s: float = field(init=False, compare=False)
    """Seconds that the running jobs take, one after the other. A decision reads it of a thousand workers."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "load_s", sum(self.alone_s(request) for request in self.running))

    @property
    def row_limit(self) -> int:
        """Upper bound on the rows of a turn."""
        return self.max_rows or 1 << 30

    def turn_seconds(self, shape: Shape) -> Callable[[float], float]:
        """Return a function from rows to the seconds of a turn with latents of that shape."""
        seconds = self.findings.turns.get(shape)
        if seconds is None:
            seconds = self.findings.turns[shape] = _turn_seconds(self.times, shape)
        return seconds

    def work(self, request: ResourceRequest, shape: Shape) -> RemainingWork:
        """Return a job as plain rows of one shape: a larger latent counts as more rows, an edit as fewer."""
        rows = self.alone(request)[0]
        if request.shape != shape:
            rows *= relative_area(request.shape, shape)
        return RemainingWork(request.steps, rows)

    def alone(self, request: ResourceRequest) -> tuple[float, float]:
        """Return a job's rows as plain rows, and the seconds of its turn alone and without add-ons."""
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
        """Return the seconds that all steps of a job take if it runs alone."""
        return self.alone(request)[1] * request.steps * request.slowdown

    def seconds_with_addons(
        self, requests: Sequence[ResourceRequest], works: Sequence[RemainingWork], shape: Shape
    ) -> Callable[[float], float]:
        """Return a function from rows to the seconds of a turn of these jobs, with what their add-ons add to it.

        A turn waits for the ControlNets of all its jobs, so that plain jobs beside them take longer, too. Turns of some
        of the jobs count as having their part of the add-ons.

        Args:
            requests: The jobs.
            works: The same jobs as plain rows.
            shape: Shape of these rows.
        """
        plain = self.turn_seconds(shape)
        added_s = sum((request.slowdown - 1.0) * self.alone(request)[1] for request in requests if request.slowdown > 1)
        if not added_s:
            return plain
        row_s = added_s / sum(work.rows for work in works)
        return lambda rows: plain(rows) + row_s * rows

    @property
    def unmeasured(self) -> bool:
        """Whether the worker has not measured any step yet."""
        return next(iter(self.times.entries()), None) is None


class WorkerPlan:
    """The plan of a worker in one round of scheduling: its running, assigned and planned jobs.

    Attributes:
        load_s: Seconds that these jobs take, one after the other.
        closed: Whether the worker gets no more jobs in this round.
    """

    __slots__ = ("_added", "_added_due_s", "_has_unbound", "closed", "load_s", "state")

    def __init__(self, state: WorkerState) -> None:
        self.state = state
        self.load_s = state.load_s
        self.closed = state.exclusive
        self._has_unbound = False
        self._added: tuple[ResourceRequest, ...] = ()
        self._added_due_s: tuple[float, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether the worker runs no job and none is planned for it."""
        return not self.state.running and not self._added and not self.state.finishing

    def has_slack(
        self, request: ResourceRequest, behind: int, *, within_share: bool = False, none_runs: bool = False
    ) -> bool:
        """Return whether a job may start on the worker now. It may not overtake a job that is planned but not assigned.

        Args:
            request: Resources that the job needs.
            behind: Number of jobs that wait behind it.
            within_share: Whether its tenant has at most its share of the running jobs.
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
        """Return the estimated seconds until a job would complete on the worker, without loading its add-ons."""
        width = self._free_width(request, behind)
        question, known = (self._added, request, width), self.state.findings.ends_s
        if question not in known:
            requests = [*self._planned, request]
            line = _works(requests, request.shape, self.state)
            width = max(1, min(width, len(line)))
            seconds = self.state.seconds_with_addons(requests, line, request.shape)
            known[question] = completion_times(line, seconds, width)[-1]
        return known[question] + self.state.fixed_s

    def add(self, request: ResourceRequest, *, bound: bool, due_s: float = inf) -> None:
        """Add a job to the plan.

        Args:
            request: Resources that the job needs.
            bound: Whether the worker gets the job now. Otherwise it is only planned.
            due_s: Seconds until the job is due.
        """
        self._added = (*self._added, request)
        self._added_due_s = (*self._added_due_s, due_s)
        self.load_s += self.state.alone_s(request)
        self._has_unbound = self._has_unbound or not bound

    def unmeasured(self, request: ResourceRequest) -> bool:
        """Return whether no turn with this number of rows of the request's shape was measured yet."""
        return self.state.times.seconds(request.shape, request.rows) is None

    def completions_s(self, *more: ResourceRequest) -> list[float]:
        """Return the seconds until each job of the plan completes, in order of arrival, then each of `more`."""
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
        return completion_times(works, self.state.seconds_with_addons(planned, works, shape), max(1, width))

    @property
    def _planned(self) -> list[ResourceRequest]:
        return [*self.state.running, *self._added]

    def _free_width(self, request: ResourceRequest, behind: int) -> int:
        """Return how many jobs may run together: no more than now if one more would make a job late.

        If many jobs wait, a wider batch is used anyway, because even a small saving per turn helps all of them.
        """
        width, here = self._width(as_typical(request), behind), len(self._planned)
        return here if here < width and behind < LOOK_AHEAD and self._makes_late(request) else width

    def _makes_late(self, request: ResourceRequest) -> bool:
        due_s = [*(self.state.due_s or [inf] * len(self.state.running)), *self._added_due_s]
        return _makes_late(self.state, self._planned, due_s, request)

    def _width(self, request: ResourceRequest, behind: int) -> int:
        """Return the best batch width for the jobs of the plan, a typical job and similar ones behind it."""
        question, known = (self._added, request, behind), self.state.findings.widths
        if question not in known:
            works = _works([*self._planned, *[request] * (1 + behind)], request.shape, self.state)
            seconds = self.state.turn_seconds(request.shape)
            known[question] = best_width(works, seconds, max_rows=self.state.row_limit)
        return known[question]


class BatchCosts:
    """The seconds that jobs take of a worker's device if its batches have the best size.

    Args:
        state: A worker of the model; most fleets have one kind of machine.
    """

    def __init__(self, state: WorkerState) -> None:
        self._state = state
        self._step_s: dict[tuple[int, Shape, float], float] = {}

    def seconds(self, request: ResourceRequest) -> float:
        """Return the seconds of a job's remaining steps, and of its encoding and decoding."""
        key = request.rows, request.shape, request.share
        if key not in self._step_s:
            self._step_s[key] = _step_s(self._state, request)
        return self._step_s[key] * request.steps * request.slowdown + self._state.fixed_s


@lru_cache(_TYPICAL)
def as_typical(request: ResourceRequest) -> ResourceRequest:
    """Return the request with a rounded share, because the best width depends little on the share of an edit."""
    return request._replace(share=ceil(request.share * _TYPICAL_SHARES) / _TYPICAL_SHARES)


def _makes_late(
    state: WorkerState, here: Sequence[ResourceRequest], due_s: Sequence[float], request: ResourceRequest
) -> bool:
    """Return whether a job on the worker would end after it is due if another one started beside it.

    A job that adds much less time to a turn than it takes alone makes none late: all gain by sharing the turn.

    Args:
        state: State of the worker.
        here: Jobs on the worker.
        due_s: Seconds until each of these jobs is due.
        request: Resources that the other job needs.
    """
    if min(due_s, default=inf) == inf:
        return False
    line, seconds = _works([*here, request], request.shape, state), state.turn_seconds(request.shape)
    rows, own = sum(work.rows for work in line), line[-1].rows
    if seconds(rows) - seconds(rows - own) <= _GAINING * seconds(own):
        return False
    ends_s = completion_times(line, state.seconds_with_addons([*here, request], line, request.shape), len(line))
    return any(end_s + state.fixed_s > due for end_s, due in zip(ends_s, due_s, strict=False))


def _has_slack(state: WorkerState, planned: Sequence[ResourceRequest], request: ResourceRequest, width: int) -> bool:
    """Return whether a batch of that width has a free place, will soon have one, or should be tried with one more."""
    if len(planned) < width:
        return True
    ahead = _works(planned, request.shape, state)
    seconds = state.seconds_with_addons(planned, ahead, request.shape)
    soon_free = _place_free_s(ahead, seconds, width) <= _lead_s(ahead, seconds)
    return soon_free or _worth_a_trial(state, [*planned, request], width)


def _worth_a_trial(state: WorkerState, requests: Sequence[ResourceRequest], width: int) -> bool:
    """Return whether the worker should run all `requests` together to measure the time of such a turn again.

    Requests of different shapes share no turn, and only rows that are computed in full give a measurement. Until then,
    estimates use the last measurement.
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


def _turn_seconds(times: StepTimes, shape: Shape) -> Callable[[float], float]:
    """Return a cached function from rows to seconds, because choosing a width evaluates the same rows many times."""

    @lru_cache(_TURNS)
    def seconds(rows: float) -> float:
        measured = times.seconds(shape, rows)
        return rows * UNMEASURED_S if measured is None else measured

    return seconds


def _step_s(state: WorkerState, request: ResourceRequest) -> float:
    """Return a job's share of the seconds of one turn in a batch of the best width."""
    turn_s, rows = state.turn_seconds(request.shape), state.alone(request)[0]
    works = [RemainingWork(max(1, request.steps), rows)] * LOOK_AHEAD
    width = max(1, best_width(works, turn_s, max_rows=state.row_limit))
    return turn_s(rows * width) / width
