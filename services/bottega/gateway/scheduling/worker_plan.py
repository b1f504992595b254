"""What a worker would do with the jobs that it has, those that a round gives it, and one more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import ceil, inf

from bottega.gateway.scheduling.worker_state import ResourceRequest, WorkerState
from bottega.planning import RemainingWork, Shape, best_width, completion_times, most_on_trial

# Pending jobs that are imagined beside the next one, and like it, when the width of a group is chosen.
LOOK_AHEAD = 4
# The lead time of a job: to encode a prompt and to cross the wire, or one and a half turns, as progress is only known
# at the end of a turn.
_LEAD_S = 0.05
_LEAD_TURNS = 1.5
# Jobs beyond a full group beside which one of a tenant below its share may still begin: a group that was wider a moment
# ago has some, and a worker serves so many turn by turn.
_BEYOND = 4
# Of what a job's turns take alone, what they add at most to those of others where it pays to run them together. On a
# CPU, where a row costs nearly as much as the one before, it is .9; but what turns of few rows take is measured at
# other times than that of many, so that it can seem to be less.
_GAINING = 0.5
# Kinds of edits, by what they compute, of which it is found out how many should run together.
_TYPICAL_SHARES = 2
_TYPICAL = 1024


class WorkerPlan:
    """A worker with what it runs, what it was given in this round, and what was planned for it.

    load_s: seconds that what is here takes, one after the other. closed: whether it gets nothing more.
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
        """Whether nothing runs here, nor is planned."""
        return not self.state.running and not self._added and not self.state.finishing

    def has_slack(
        self, request: ResourceRequest, behind: int, *, within_share: bool = False, none_runs: bool = False
    ) -> bool:
        """Return whether a job may begin here now. Nobody overtakes one that is planned here and not bound yet.

        Args:
            request: What it needs.
            behind: How many jobs wait behind it.
            within_share: Whether its tenant has at most its share of what runs.
            none_runs: Whether none of its tenant's jobs runs. It may be beyond any number of those of others.
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
        """Seconds until a job would complete here, what it has to load aside."""
        width = self._free_width(request, behind)
        question, known = (self._added, request, width), self.state.findings.ends_s
        if question not in known:
            line = _works([*self._planned, request], request.shape, self.state)
            width = max(1, min(width, len(line)))
            known[question] = completion_times(line, self.state.turn_seconds(request.shape), width)[-1]
        return known[question] + self.state.fixed_s

    def add(self, request: ResourceRequest, *, bound: bool, due_s: float = inf) -> None:
        """Counts a job in. bound: whether the worker gets it now. due_s: seconds until it is due."""
        self._added = (*self._added, request)
        self._added_due_s = (*self._added_due_s, due_s)
        self.load_s += self.state.alone_s(request)
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
        width = best_width(works[: 2 * LOOK_AHEAD], seconds, max_rows=self.state.most_rows)
        running, due_s = self.state.running, self.state.due_s
        few_wait = 0 < len(planned) - len(running) <= LOOK_AHEAD
        if width > len(running) and few_wait and _makes_late(self.state, running, due_s, planned[len(running)]):
            width = len(running)
        return completion_times(works, seconds, max(1, width))

    @property
    def _planned(self) -> list[ResourceRequest]:
        return [*self.state.running, *self._added]

    def _free_width(self, request: ResourceRequest, behind: int) -> int:
        """How many may run together here: no more than there are, while one more would make one of these late.

        Where many wait that would be in vain: what turns share, however little, counts for all of them.
        """
        width, here = self._width(as_typical(request), behind), len(self._planned)
        return here if here < width and behind < LOOK_AHEAD and self._makes_late(request) else width

    def _makes_late(self, request: ResourceRequest) -> bool:
        due_s = [*(self.state.due_s or [inf] * len(self.state.running)), *self._added_due_s]
        return _makes_late(self.state, self._planned, due_s, request)

    def _width(self, request: ResourceRequest, behind: int) -> int:
        """How many should run together here, a typical job and some like it behind it among them."""
        question, known = (self._added, request, behind), self.state.findings.widths
        if question not in known:
            works = _works([*self._planned, *[request] * (1 + behind)], request.shape, self.state)
            seconds = self.state.turn_seconds(request.shape)
            known[question] = best_width(works, seconds, max_rows=self.state.most_rows)
        return known[question]


@lru_cache(_TYPICAL)
def as_typical(request: ResourceRequest) -> ResourceRequest:
    """A request like this one, of few kinds: how many should run together depends but little on what they compute."""
    return request._replace(share=ceil(request.share * _TYPICAL_SHARES) / _TYPICAL_SHARES)


def _makes_late(
    state: WorkerState, here: Sequence[ResourceRequest], due_s: Sequence[float], request: ResourceRequest
) -> bool:
    """Whether beside a job one of those that are here, each due in so many seconds, would end after it is due.

    Never where it adds much less to a turn than it takes alone: what turns share, all gain.
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


def _works(requests: Iterable[ResourceRequest], shape: Shape, state: WorkerState) -> list[RemainingWork]:
    return [state.work(request, shape) for request in requests]


def _lead_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float]) -> float:
    return max(_LEAD_S, _LEAD_TURNS * seconds(sum(work.rows for work in ahead)))


def _place_free_s(ahead: Sequence[RemainingWork], seconds: Callable[[float], float], width: int) -> float:
    """Seconds until fewer than `width` of `ahead`, which run together, are left."""
    clock, turn = 0.0, 0
    rows = sum(work.rows for work in ahead)
    for steps, ended_rows in sorted(ahead)[: len(ahead) - width + 1]:
        if steps > turn:
            clock += (steps - turn) * seconds(rows)
            turn = steps
        rows -= ended_rows
    return clock
