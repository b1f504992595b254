"""The scheduling policy: which worker gets which pending job, and when. Pure functions of what is given to them.

Three rules, in the order of `assign`:

1. The order of the line (`bottega.gateway.scheduling.line`). No job takes what one before it waits for: when no worker
   has slack for a job, the round is over. Only a job that few workers may have waits without holding up the others.
2. Least estimated completion. A job goes to the worker where it is expected to complete first, by measured step times:
   after what runs there, what was planned for it in this round, and what the job has to load there before it begins.
   An edit counts by the part of it that a worker computes: where its template's activations are at hand, that is little
   more than its mask.
3. Slack. A job is bound to its worker as late as possible, so that it may still go to another one: only when the group
   of the worker has a free place, or will have one within the lead time, in which the prompt is encoded. Until then it
   stays in the queue, and the worker's plan counts it in. Where turns become hardly cheaper by it, a job also stays in
   the queue while beside it one of the group would end after it is due, unless many wait. A job
   of a tenant that has less than its share of what runs is bound to a worker whose group is full, if few are beyond it,
   or if none of the tenant's runs: the worker's turns are shared by their seconds.

The engine of a worker forms its groups by the same cost model (bottega.planning).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from operator import attrgetter

from bottega.gateway.scheduling.worker_plan import LOOK_AHEAD, WorkerPlan, as_typical
from bottega.gateway.scheduling.worker_state import ResourceRequest, WorkerState

# Pending jobs that are considered in one round; those behind them cannot change who is next. And of these, those that
# are planned at a worker without a place, because they would be done sooner there than where there is one.
_HORIZON = 32
_MOST_UNBOUND = 2
# Of many workers those that have least to do are compared; of these, those are looked at closely that would have a job
# done soonest if nothing shared a turn, and the idlest, where a place is likely.
_LEAST_BUSY, _NEAREST, _IDLEST = 16, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJob:
    """A job in the queue.

    avoid: a worker that must not have it, because it was just lost with it. exclusive: it may only run by itself,
    because a worker may have died of it. within_share: its tenant has at most its share of what runs, with it, while
    others have jobs too. eligible: the only workers that may have it; None is all of them.
    load_s: seconds that it needs at a worker before its first step, by worker; none where a worker is not named.
    reduced: what it needs of workers of which it needs less than `request`, by worker; see request_at.
    due_s: seconds until it is due, see `bottega.gateway.scheduling.line`; endless for one that is not.
    """

    job_id: str
    request: ResourceRequest
    avoid: str = ""
    exclusive: bool = False
    within_share: bool = False
    none_runs: bool = False
    """No job of its tenant runs, and others have jobs."""
    eligible: frozenset[str] | None = None
    load_s: Mapping[str, float] = field(default_factory=dict)
    reduced: Mapping[str, ResourceRequest] = field(default_factory=dict)
    due_s: float = inf

    def request_at(self, worker: str) -> ResourceRequest:
        """What it needs of that worker."""
        return self.reduced.get(worker, self.request)

    def may_run_on(self, worker: str) -> bool:
        """Whether that worker may have it."""
        return worker != self.avoid and (self.eligible is None or worker in self.eligible)


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
    pending: Iterable[PendingJob], workers: Sequence[WorkerState], *, waiting: int, contended: bool = False
) -> list[Assignment]:
    """Which of the pending jobs, in their order, leave the queue now. Looks at no more of them than it must.

    An exclusive job takes an idle worker, else one is drained for it: never more than one at a time, so that the others
    go on. waiting: how many wait in all; those that nobody may have now need not be among `pending`.
    contended: several tenants have jobs: behind one that no worker has a place for there may be one within its
    tenant's share.
    """
    if not workers:
        return []
    plans = [WorkerPlan(worker) for worker in workers]
    assignments: list[Assignment] = []
    unbound, blocked = 0, False
    for number, job in enumerate(islice(pending, _HORIZON), start=1):
        behind = min(max(0, waiting - number), LOOK_AHEAD)
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
        best = min(options, key=_COMPLETES_S)
        if best.has_slack:
            assignments.append(best.assignment())
        best.plan.add(best.request, bound=best.has_slack, due_s=job.due_s)
        best.plan.closed = job.exclusive
        unbound += not best.has_slack
        if unbound > _MOST_UNBOUND:
            break
    return assignments


def _shortlist(job: PendingJob, candidates: Iterable[WorkerPlan]) -> list[WorkerPlan]:
    """Those of the workers that are looked at closely."""
    plans = [plan for plan in candidates if not plan.closed]
    if len(plans) <= _NEAREST + _IDLEST:
        return plans

    whole, reduced, load_s = as_typical(job.request), job.reduced, job.load_s.get

    def at_most_s(plan: WorkerPlan) -> float:
        state = plan.state
        worker = state.worker
        request = as_typical(reduced[worker]) if worker in reduced else whole
        return plan.load_s + state.alone_s(request) + load_s(worker, 0.0)

    least_busy = sorted(plans, key=_LOAD_S)[:_LEAST_BUSY]
    nearest = sorted(least_busy, key=at_most_s)[:_NEAREST]
    return nearest + [plan for plan in least_busy if plan not in nearest][:_IDLEST]


_LOAD_S = attrgetter("load_s")
_COMPLETES_S = attrgetter("completes_s")


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
        self.has_slack = plan.has_slack(self.request, behind, within_share=job.within_share, none_runs=job.none_runs)
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
