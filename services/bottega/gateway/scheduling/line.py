"""The jobs that wait for one model, in the order in which their tenants' shares let them be served.

A tenant has a place for each of its jobs, by its share. Its jobs have these by when they are due: earliest deadline
first. A job is due a multiple of what it takes alone after it came, so that short ones do not wait for long ones that
came shortly before; by its own deadline, if that is earlier. One of high priority is served as if it were due a fixed
time earlier, one of low priority later. So neither length nor priority changes the places of other tenants, and every
job is served in the end: those that come after it was due are due later still.

Sources: Liu and Layland, "Scheduling Algorithms for Multiprogramming in a Hard-Real-Time Environment", JACM 1973
(earliest deadline first); deadlines as multiples of the time alone are the "SLO scale" of AlpaServe (Li et al., OSDI
2023).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.worker_state import ResourceRequest
from bottega.planning import FairOrder
from bottega.v1.image_pb2 import PRIORITY_HIGH, PRIORITY_LOW

Weigh = Callable[[str], float]
"""The weight of a tenant, by its name; above 0."""


def equal_weights(tenant: str) -> float:
    """A Weigh to which all tenants are the same."""
    del tenant
    return 1.0


class JobSizes(Protocol):
    """Says how long jobs are."""

    def resource_request(self, job: Job) -> ResourceRequest:
        """What a job is expected to need. Equal ones take equally long."""
        ...

    def alone_s(self, model: str, request: ResourceRequest) -> float:
        """Seconds of such a job on a worker that has nothing else; 0 while nothing was measured."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DuePolicy:
    """When jobs are due, after they came.

    slo_scale: in so many times what they take alone; 0 is first come, first served. head_start_s: by how much earlier
    one of high priority is served as if it were due, and one of low priority later.
    """

    slo_scale: float = 0.0
    head_start_s: float = 0.0


# Kinds of jobs whose length is remembered.
_KINDS = 1024
# Of a place: of equal tags the job comes first that came first.
_Place = tuple[float, int]
# How much earlier a job is served, in head starts.
_EARLIER = {PRIORITY_HIGH: 1.0, PRIORITY_LOW: -1.0}


@dataclass(slots=True)
class _OfTenant:
    """What one tenant has in the line, each in its order: places, jobs, and by what these are ordered; see Line."""

    places: list[_Place] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    served_by: list[float] = field(default_factory=list)


class Line:
    """Of one tenant, the job first that is due first. A job costs its rows by its steps.

    sizes: how long jobs are; None counts all of them as equally long.
    """

    def __init__(self, weigh: Weigh, policy: DuePolicy, sizes: JobSizes | None = None) -> None:
        self._weigh = weigh
        self._policy = policy
        self._sizes = sizes
        # Jobs that need the same are equally long while some wait: none passes another because turns take less by now.
        self._alone_s: dict[ResourceRequest, float] = {}
        self._order = FairOrder()
        self._places: list[_Place] = []
        self._jobs: list[Job] = []
        self._place_of: dict[str, _Place] = {}
        self._tenants: dict[str, _OfTenant] = {}
        self._added = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def jobs(self) -> Sequence[Job]:
        """In their order. Not to be changed; it changes with the line."""
        return self._jobs

    @property
    def tenants(self) -> Collection[str]:
        """Those whose jobs are here."""
        return self._tenants.keys()

    def add(self, job: Job) -> None:
        """Behind those of its tenant that are due no later."""
        tenant = job.request.tenant
        cost = float(max(1, job.rows * job.steps.total))
        self._added += 1
        place = self._order.tag(tenant, cost=cost, weight=self._weigh(tenant)), self._added
        job.times.due_at = self._due_at(job)
        served_by = self._served_by(job, job.times.due_at)
        own = self._tenants.setdefault(tenant, _OfTenant())
        at = bisect_right(own.served_by, served_by)
        own.served_by.insert(at, served_by)
        own.jobs.insert(at, job)
        own.places.append(place)
        self._insert(place, job)
        for index in range(at, len(own.jobs)):
            self._put(own.places[index], own.jobs[index])

    def add_first(self, job: Job) -> None:
        """Before all others: it had its turn, and was lost."""
        self._added += 1
        place = -inf, -self._added
        own = self._tenants.setdefault(job.request.tenant, _OfTenant())
        own.served_by.insert(0, -inf)
        own.jobs.insert(0, job)
        own.places.insert(0, place)
        self._insert(place, job)
        self._put(place, job)

    def remove(self, job: Job) -> None:
        """It is served, or does not wait any more."""
        place = self._place_of.pop(job.job_id)
        at = bisect_left(self._places, place)
        del self._places[at], self._jobs[at]
        own = self._tenants[job.request.tenant]
        index = bisect_left(own.places, place)
        del own.places[index], own.jobs[index], own.served_by[index]
        if not own.jobs:
            del self._tenants[job.request.tenant]
        if not self._places:
            self._order.idle()
        elif at == 0:  # else others may have to be served before what comes now
            self._order.served(place[0])

    def place(self, job: Job) -> int:
        """Jobs that are before it."""
        return bisect_left(self._places, self._place_of[job.job_id])

    def before(self, job: Job) -> Sequence[Job]:
        """Jobs that are before one that waits, or would be before one that does not."""
        place = self._place_of.get(job.job_id) or self._place_if_added(job)
        end = bisect_left(self._places, place)
        return self._jobs[:end]

    def _due_at(self, job: Job) -> float:
        """On the monotonic clock; endless where its length is not known, or does not count."""
        wait_s = self._policy.slo_scale * self._seconds(job)
        if not wait_s:
            return inf
        due_at = job.times.created_at + wait_s
        return due_at if job.deadline is None else min(due_at, job.deadline)

    def _served_by(self, job: Job, due_at: float) -> float:
        """By what its tenant's jobs are ordered: when it is due, or came, but for its priority."""
        earlier_s = self._policy.head_start_s * _EARLIER.get(job.request.priority, 0.0)
        return (job.times.created_at if due_at == inf else due_at) - earlier_s

    def _seconds(self, job: Job) -> float:
        """What it takes alone; 0 where that is not known."""
        if self._sizes is None:
            return 0.0
        request = self._sizes.resource_request(job)
        known = self._alone_s.get(request)
        if not known:
            if len(self._alone_s) >= _KINDS:
                self._alone_s.clear()
            known = self._alone_s[request] = self._sizes.alone_s(job.bare.model, request)
        return known

    def _place_if_added(self, job: Job) -> _Place:
        own = self._tenants.get(job.request.tenant)
        at = bisect_right(own.served_by, self._served_by(job, self._due_at(job))) if own is not None else 0
        if own is not None and at < len(own.places):
            return own.places[at]
        return self._order.next_tag(job.request.tenant), self._added + 1

    def _insert(self, place: _Place, job: Job) -> None:
        at = bisect_left(self._places, place)
        self._places.insert(at, place)
        self._jobs.insert(at, job)

    def _put(self, place: _Place, job: Job) -> None:
        """The job has that place from now on."""
        self._jobs[bisect_left(self._places, place)] = job
        self._place_of[job.job_id] = place
