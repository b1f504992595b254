"""The queue of one model: its waiting jobs, in the order in which they are served.

Tenants share the workers by device seconds (bottega.fair_order). When a job starts, its tenant is charged the seconds
that it is expected to take. When its attempt has ended, the charge is corrected to the seconds that it took, so no
tenant gains by a wrong estimate.

The jobs of one tenant are served by earliest due time. A job is due at its arrival plus a multiple of the time that it
takes alone on a worker, so that short jobs do not wait for long ones that came shortly before them. If the job has an
earlier deadline, it is due then. A job of high priority counts as due a fixed time earlier, and one of low priority
later. So priorities only order the jobs of one tenant. No job waits forever, because jobs that arrive after its due
time are due later than it.

Sources: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973
(earliest deadline first); deadlines as multiples of the time alone are the "SLO scale" of AlpaServe (Li et al., OSDI
2023).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from typing import Protocol

from bottega.fair_order import FairOrder
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.worker_plan import UNMEASURED_S, ResourceRequest
from bottega.v1.image_pb2 import PRIORITY_HIGH, PRIORITY_LOW

Weigh = Callable[[str], float]
"""Returns the weight of a tenant by its name; above 0."""


class JobSizes(Protocol):
    """Estimates of how long jobs take."""

    def resource_request(self, job: Job) -> ResourceRequest:
        """Return the batch rows, steps and latent size that a job needs. Jobs with equal requests take equally long."""
        ...

    def alone_s(self, model: str, request: ResourceRequest) -> float:
        """Return the seconds that a job takes alone on a worker; 0 while no step has been measured."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePolicy:
    """The rule that says when jobs are due."""

    slo_scale: float = 0.0
    """Multiple of the time that a job takes alone, after which it is due; 0 serves jobs first come, first served."""
    head_start_s: float = 0.0
    """Seconds by which a job of high priority counts as due earlier, and one of low priority as due later."""


# Number of resource requests whose duration is cached.
_KINDS = 1024
# A tenant may be passed over because no worker can run its jobs. Afterwards it is served first, but for no more than
# these device seconds over its weight, however long that lasted.
_MAX_BEHIND_S = 60.0
# Multiples of head_start_s by which a job is served earlier, by its priority.
_EARLIER = {PRIORITY_HIGH: 1.0, PRIORITY_LOW: -1.0}

_Place = tuple[float, int]
"""Sort key of jobs of several tenants: the virtual start time, then the tenant's number."""


@dataclass(slots=True, kw_only=True)
class _TenantJobs:
    """The waiting jobs of one tenant in the queue of a model."""

    number: int
    """Number of the tenant, counted from 1 in the order in which tenants joined the queue."""
    jobs: list[Job] = field(default_factory=list)
    """The jobs in the order in which they are served."""
    served_by: list[float] = field(default_factory=list)
    """The key by which each job is sorted; see Line._served_by."""
    begins: list[float] = field(default_factory=list)
    """Virtual time at which each job starts: the sum of the costs of the jobs before it, over the tenant's weight."""
    end: float = 0.0
    """Virtual time at which the last job ends."""

    def insert(self, at: int, job: Job, served_by: float, cost: float) -> None:
        self.jobs.insert(at, job)
        self.served_by.insert(at, served_by)
        self.begins.insert(at, self.begins[at] if at < len(self.begins) else self.end)
        self._shift(at + 1, cost)

    def remove(self, at: int) -> None:
        cost = self._cost(at)
        del self.jobs[at], self.served_by[at], self.begins[at]
        if at:  # jobs behind the first one start later by the removed cost
            self._shift(at, -cost)

    def _cost(self, at: int) -> float:
        return (self.begins[at + 1] if at + 1 < len(self.begins) else self.end) - self.begins[at]

    def _shift(self, first: int, by: float) -> None:
        for place in range(first, len(self.begins)):
            self.begins[place] += by
        self.end += by


class Line:
    """The queue of one model. Iterating over it yields its jobs in the order in which they are served.

    Args:
        weigh: Returns the weight of a tenant.
        policy: The rule that says when jobs are due.
        sizes: Estimates how long jobs take; None counts all jobs as equally long, and charges rows times steps.
    """

    def __init__(self, weigh: Weigh, policy: DuePolicy, sizes: JobSizes | None = None) -> None:
        self._weigh = weigh
        self._policy = policy
        self._sizes = sizes
        # Durations are fixed while jobs wait, so that no job passes another because forward passes got faster.
        self._alone_s: dict[ResourceRequest, float] = {}
        self._order = FairOrder()
        self._lost: list[Job] = []
        self._tenants: dict[str, _TenantJobs] = {}
        self._waiting: dict[str, Job] = {}
        self._charged: dict[str, _Charge] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Job]:
        yield from tuple(self._lost)
        for _, _, job in heapq.merge(*(self._placed(name, own) for name, own in self._tenants.items())):
            yield job

    @property
    def idle(self) -> bool:
        """Whether no job waits, and the charge of every job that started is settled."""
        return not self._waiting and not self._charged

    @property
    def unordered(self) -> Collection[Job]:
        """The waiting jobs in no particular order. Any thread may read it."""
        return self._waiting.values()

    @property
    def tenants(self) -> Collection[str]:
        """The tenants with jobs in this queue."""
        return self._tenants.keys() | {job.request.tenant for job in self._lost}

    def add(self, job: Job) -> None:
        """Add a job behind the jobs of its tenant that are due no later."""
        job.times.due_at = self._due_at(job)
        served_by = self._served_by(job, job.times.due_at)
        own = self._tenants.get(job.request.tenant)
        if own is None:
            self._came += 1
            own = self._tenants[job.request.tenant] = _TenantJobs(number=self._came)
        cost = self._cost_s(job) / self._weigh(job.request.tenant)
        own.insert(bisect_right(own.served_by, served_by), job, served_by, cost)
        self._waiting[job.job_id] = job

    def add_first(self, job: Job) -> None:
        """Add a job before all others, because it was running already and its attempt was lost."""
        self._lost.insert(0, job)
        self._waiting[job.job_id] = job

    def remove(self, job: Job) -> None:
        """Remove a job that no longer waits."""
        if self._waiting.pop(job.job_id, None) is None:
            return
        if job in self._lost:
            self._lost.remove(job)
        else:
            name, own = job.request.tenant, self._tenants[job.request.tenant]
            own.remove(self._index(own, job))
            if not own.jobs:
                del self._tenants[name]
        if self.idle:
            self._order.idle()

    def begin(self, job: Job) -> None:
        """Remove a job that starts now. Charge its tenant the expected seconds, until `settle` corrects them."""
        tenant = job.request.tenant
        least = min((self._order.next_tag(name) for name in self.tenants), default=0.0)
        self._order.served(max(least, self._order.next_tag(tenant) - _MAX_BEHIND_S))
        charge = _Charge(tenant=tenant, weight=self._weigh(tenant), seconds=self._cost_s(job))
        self._charged[job.job_id] = charge
        self._order.charge(tenant, cost=charge.seconds, weight=charge.weight)
        self.remove(job)

    def settle(self, job: Job, device_s: float | None) -> None:
        """Replace the expected seconds in the charge of a job by the seconds that its attempt took.

        Args:
            job: A job that was started, possibly before a restart of the gateway.
            device_s: Seconds for which it used the worker's device; None if unknown: the expected seconds stay charged.
        """
        tenant = job.request.tenant
        charge = self._charged.pop(job.job_id, None) or _Charge(tenant=tenant, weight=self._weigh(tenant), seconds=0.0)
        if device_s is not None:
            self._order.charge(charge.tenant, cost=device_s - charge.seconds, weight=charge.weight)
        if self.idle:
            self._order.idle()

    def place(self, job: Job) -> int:
        """Return how many jobs are served before a waiting job."""
        if job in self._lost:
            return self._lost.index(job)
        return self._before(job.request.tenant, self._index(self._tenants[job.request.tenant], job))

    def before(self, job: Job) -> Sequence[Job]:
        """Return the jobs that are served before a job. If it does not wait, act as if it were added now."""
        if job.job_id in self._waiting:
            return list(islice(self, self.place(job)))
        own = self._tenants.get(job.request.tenant)
        at = bisect_right(own.served_by, self._served_by(job, self._due_at(job))) if own is not None else 0
        return list(islice(self, self._before(job.request.tenant, at)))

    def _placed(self, name: str, own: _TenantJobs) -> Iterator[tuple[float, int, Job]]:
        """Yield a tenant's jobs with the keys by which the jobs of all tenants are sorted."""
        tag, begins = self._order.next_tag(name), tuple(own.begins)
        for begin, job in zip(begins, tuple(own.jobs), strict=True):
            yield tag + (begin - begins[0]), own.number, job

    def _before(self, tenant: str, at: int) -> int:
        """Return how many jobs of all tenants are served before a tenant's job at index `at`."""
        own = self._tenants.get(tenant)
        number = self._came + 1 if own is None else own.number
        tag = self._order.next_tag(tenant)
        if own is not None:
            tag += (own.begins[at] if at < len(own.begins) else own.end) - own.begins[0]
        others = [(name, other) for name, other in self._tenants.items() if other is not own]
        return len(self._lost) + at + sum(self._before_tag(name, other, (tag, number)) for name, other in others)

    def _before_tag(self, name: str, own: _TenantJobs, place: _Place) -> int:
        tag, first = self._order.next_tag(name), own.begins[0]
        return bisect_left(own.begins, place, key=lambda begin: (tag + (begin - first), own.number))

    def _index(self, own: _TenantJobs, job: Job) -> int:
        served_by = self._served_by(job, job.times.due_at)
        at = bisect_left(own.served_by, served_by)
        return own.jobs.index(job, at)

    def _cost_s(self, job: Job) -> float:
        evaluations = job.steps.total * job.request.evaluations_per_step
        return self._seconds(job) or UNMEASURED_S * max(1, job.rows * evaluations)

    def _due_at(self, job: Job) -> float:
        """Return when a job is due, on the monotonic clock; inf if its duration is unknown or due times are off."""
        wait_s = self._policy.slo_scale * self._seconds(job) if self._policy.slo_scale else 0.0
        if not wait_s:
            return inf
        due_at = job.times.created_at + wait_s
        return due_at if job.deadline is None else min(due_at, job.deadline)

    def _served_by(self, job: Job, due_at: float) -> float:
        """Return the key by which a tenant's jobs are sorted: due time, or arrival time, shifted by the priority."""
        earlier_s = self._policy.head_start_s * _EARLIER.get(job.request.priority, 0.0)
        return (job.times.created_at if due_at == inf else due_at) - earlier_s

    def _seconds(self, job: Job) -> float:
        """Return the seconds that a job takes alone; 0 if unknown."""
        if self._sizes is None:
            return 0.0
        request = self._sizes.resource_request(job)
        known = self._alone_s.get(request)
        if not known:
            if len(self._alone_s) >= _KINDS:
                self._alone_s.clear()
            known = self._alone_s[request] = self._sizes.alone_s(job.bare.model, request)
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class _Charge:
    """The charge of a tenant for a job that started."""

    tenant: str
    weight: float
    seconds: float
