"""The scheduling policy: which worker gets which pending job, and when. Its functions depend only on their arguments.

`assign` applies three rules in this order:

1. The order of the queue (`bottega.gateway.scheduling.line`). A job never takes the place that an earlier job waits
   for: when no worker has slack for a job, the round is over. The exception is a job that only few workers may run: it
       waits without delaying the others.
2. Least estimated completion. A job goes to the worker where it is expected to complete first, by measured step times:
after the jobs that run there, the jobs planned for it in this round, and the loading that the job needs there.
   An edit counts by the share of tokens that the worker would compute: a worker that can read recorded activations of
   the image computes little more than the mask.
3. Slack. A job is assigned to its worker as late as possible, so that it may still go to another one: only when the
worker's batch has a free place, or will have one within the lead time, which is long enough to encode the prompt. Until
then the job stays in the queue, and the worker's plan counts it. If running the job in the batch saves hardly any time,
it also stays in the queue while it would make a job of the batch late, unless many jobs wait.
   A tenant that has less than its share of the running jobs may exceed a full batch: its job is assigned if the batch
   is only a few jobs over its best size, or if none of the tenant's jobs runs. The worker shares its device among
   tenants by seconds.

The engine of a worker forms its batches by the same cost model (bottega.planning).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from operator import attrgetter

from bottega.gateway.scheduling.worker_plan import LOOK_AHEAD, ResourceRequest, WorkerPlan, WorkerState, as_typical

# Number of pending jobs that are considered in one round. Jobs behind them cannot change which one is next.
_HORIZON = 32
# Number of these jobs that may be planned at a worker without a free place, because they would complete sooner there.
_MAX_UNBOUND = 2
# Of many workers, the least loaded are compared. Of these, the ones that would complete a job soonest if no
# forward pass were shared are examined, and the least loaded, where a place is likely.
_LEAST_BUSY, _NEAREST, _IDLEST = 16, 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingJob:
    """A job in the queue, as the policy sees it."""

    job_id: str
    request: ResourceRequest
    avoid: str = ""
    """Name of the worker that must not get the job, because it was lost while it ran the job; "" if there is none."""
    exclusive: bool = False
    """Whether the job may only run alone, because it may have made a worker die."""
    within_share: bool = False
    """Whether its tenant would stay within its share of the running jobs if it started, while other tenants wait."""
    none_runs: bool = False
    """Whether none of its tenant's jobs runs, while other tenants have jobs."""
    eligible: frozenset[str] | None = None
    """Names of the only workers that may get the job; None means all."""
    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that loading takes before the first step, by worker; 0 for workers that are not listed."""
    reduced: Mapping[str, ResourceRequest] = field(default_factory=dict)
    """Resources that the job needs at the workers where it needs less than `request`; see request_at."""
    due_s: float = inf
    """Seconds until the job is due (see `bottega.gateway.scheduling.line`); inf if it has no due time."""

    def request_at(self, worker: str) -> ResourceRequest:
        """Return the resources that the job needs at a worker."""
        return self.reduced.get(worker, self.request)

    def may_run_on(self, worker: str) -> bool:
        """Return whether a worker may get the job."""
        return worker != self.avoid and (self.eligible is None or worker in self.eligible)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The decision that a worker gets a job now."""

    job_id: str
    worker: str
    estimate_s: float | None
    """Seconds until the job completes, including loading; None while no step has been measured."""
    exclusive: bool = False
    """Whether the worker runs no other job."""


class RunningShares:
    """The tenants' shares of a model's running jobs, in one round of scheduling.

    A job of a tenant that has less than its share need not wait for a place that another tenant uses.

    Args:
        running: Number of running attempts by tenant.
        waiting: Tenants whose jobs wait. Tenants with no running or waiting job get no share.
        weigh: Returns the weight of a tenant.
        may_begin: Returns how many more jobs of a tenant may run; None means no bound.

    Attributes:
        contended: Whether several tenants have jobs.
    """

    def __init__(
        self,
        running: Mapping[str, int],
        waiting: Collection[str],
        weigh: Callable[[str], float],
        may_begin: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        self._may_begin = may_begin
        self._left: dict[str, int | None] = {}
        tenants = running.keys() | set(waiting)
        self.contended = len(tenants) > 1
        self._weights = {tenant: weigh(tenant) for tenant in tenants} if self.contended else {}
        self._weight = sum(self._weights.values())
        self._running = Counter(running) if self.contended else Counter[str]()

    def begin(self, tenant: str) -> bool:
        """Return whether another job of a tenant may run now. If so, count it."""
        if tenant not in self._left:
            self._left[tenant] = self._may_begin(tenant)
        left = self._left[tenant]
        if left is None:
            return True
        self._left[tenant] = left - 1
        return left > 0

    def has_none(self, tenant: str) -> bool:
        """Return whether no job of a tenant runs while other tenants have jobs."""
        return self.contended and not self._running[tenant]

    def claim(self, tenant: str) -> bool:
        """Return whether one more job keeps a tenant within its share. If so, count the job."""
        if not self.contended:
            return False
        jobs, all_jobs = self._running[tenant] + 1, self._running.total() + 1
        if jobs * self._weight > all_jobs * self._weights[tenant]:
            return False
        self._running[tenant] = jobs
        return True


def assign(
    pending: Iterable[PendingJob], workers: Sequence[WorkerState], *, waiting: int, contended: bool = False
) -> list[Assignment]:
    """Return the pending jobs that start now, each with its worker.

    An exclusive job takes an idle worker. Without one, a worker is drained for it: never more than one at a time, so
    that the other jobs go on.

    Args:
        pending: Jobs in the order of the queue. It is read only as far as needed. It may omit jobs that no worker may
            run now.
        workers: States of the workers.
        waiting: Total number of jobs that wait.
        contended: Whether several tenants have jobs. Then, after a job for which no worker has a place, later jobs that
            are within their tenant's share may still start.
    """
    if not workers:
        return []
    plans = _Plans(workers)
    assignments: list[Assignment] = []
    unbound, blocked = 0, False
    for number, job in enumerate(islice(pending, _HORIZON), start=1):
        behind = min(max(0, waiting - number), LOOK_AHEAD)
        if blocked and not job.within_share:
            continue
        options = [_Option(job, plan, behind) for plan in _shortlist(job, plans.candidates(job))]
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
        if unbound > _MAX_UNBOUND:
            break
    return assignments


class _Plans:
    """The plans of all workers in one round. Of a thousand workers, a few are considered, and only they get one."""

    def __init__(self, workers: Sequence[WorkerState]) -> None:
        self._workers = workers
        self._made: dict[int, WorkerPlan] = {}
        loads_s = [worker.load_s for worker in workers]
        self._least_busy_first = sorted(range(len(workers)), key=loads_s.__getitem__)

    def candidates(self, job: PendingJob) -> list[WorkerPlan]:
        """Return the open plans of workers that may get a job: all if they are few, else the least busy ones.

        The least busy come first if they are not all.
        """
        if job.exclusive:
            plans = [self._plan(place) for place in range(len(self._workers))]
            allowed = [plan for plan in plans if job.may_run_on(plan.state.worker)]
            return _least_busy([plan for plan in _idle_or_drained(allowed, plans) if not plan.closed])
        anywhere, made = not job.avoid and job.eligible is None, self._made
        # A plan that was made may have jobs by now, so these are compared with the least busy of the others.
        places = [place for place, plan in made.items() if not plan.closed]
        places = places if anywhere else [place for place in places if job.may_run_on(self._workers[place].worker)]
        wanted = _LEAST_BUSY
        for place in self._least_busy_first:
            worker = self._workers[place]
            if place not in made and not worker.exclusive and (anywhere or job.may_run_on(worker.worker)):
                places.append(place)
                wanted -= 1
                if not wanted:
                    break
        return _least_busy([self._plan(place) for place in sorted(places)])

    def _plan(self, place: int) -> WorkerPlan:
        plan = self._made.get(place)
        if plan is None:
            plan = self._made[place] = WorkerPlan(self._workers[place])
        return plan


def _least_busy(plans: list[WorkerPlan]) -> list[WorkerPlan]:
    return plans if len(plans) <= _NEAREST + _IDLEST else sorted(plans, key=_LOAD_S)[:_LEAST_BUSY]


def _shortlist(job: PendingJob, least_busy: list[WorkerPlan]) -> list[WorkerPlan]:
    """Return the plans that are examined for a job."""
    if len(least_busy) <= _NEAREST + _IDLEST:
        return least_busy

    whole, reduced, load_s = as_typical(job.request), job.reduced, job.load_s.get

    def at_most_s(plan: WorkerPlan) -> float:
        state = plan.state
        worker = state.worker
        request = as_typical(reduced[worker]) if worker in reduced else whole
        return plan.load_s + state.alone_s(request) + load_s(worker, 0.0)

    nearest = sorted(least_busy, key=at_most_s)[:_NEAREST]
    return nearest + [plan for plan in least_busy if plan not in nearest][:_IDLEST]


_LOAD_S = attrgetter("load_s")
_COMPLETES_S = attrgetter("completes_s")


def _idle_or_drained(candidates: list[WorkerPlan], plans: Sequence[WorkerPlan]) -> list[WorkerPlan]:
    """Return the idle workers for an exclusive job. If there is none, close the worker that will be idle first."""
    idle = [plan for plan in candidates if plan.empty]
    if not idle and candidates and not any(plan.closed for plan in plans):
        min(candidates, key=lambda plan: plan.load_s).closed = True
    return idle


class _Option:
    """The choice of one worker for a job: the resources needed there, and whether there is a place now."""

    __slots__ = ("_behind", "_load_s", "has_slack", "job", "plan", "request")

    def __init__(self, job: PendingJob, plan: WorkerPlan, behind: int) -> None:
        worker = plan.state.worker
        self.job, self.plan, self._behind = job, plan, behind
        self.request = job.request_at(worker)
        self.has_slack = plan.has_slack(self.request, behind, within_share=job.within_share, none_runs=job.none_runs)
        self._load_s = job.load_s.get(worker, 0.0)

    @property
    def completes_s(self) -> float:
        """Estimated seconds until the job would complete there."""
        return self.plan.completes_s(self.request, self._behind) + self._load_s

    def assignment(self) -> Assignment:
        state = self.plan.state
        return Assignment(
            job_id=self.job.job_id,
            worker=state.worker,
            estimate_s=None if state.unmeasured else self.completes_s,
            exclusive=self.plan.empty,
        )
