"""The jobs that wait for one model, in the order in which their tenants' shares let them be served.

A tenant has a place for each of its jobs, by its share. Which of its jobs has which of them is by priority: one of high
priority counts as if it had come earlier, one of low priority as if later, each by a fixed time. So priorities change
nothing between tenants, and every job is served in the end: in that time it has aged past those that come after it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from math import inf

from bottega.gateway.jobs.job import Job
from bottega.planning import FairOrder
from bottega.v1.image_pb2 import PRIORITY_HIGH, PRIORITY_LOW

Weigh = Callable[[str], float]
"""The weight of a tenant, by its name; above 0."""


def equal_weights(tenant: str) -> float:
    """A Weigh to which all tenants are the same."""
    del tenant
    return 1.0


# Of a place: of equal tags the job comes first that came first.
_Place = tuple[float, int]
# How much earlier a job counts to have come than it came, in head starts.
_EARLIER = {PRIORITY_HIGH: 1.0, PRIORITY_LOW: -1.0}


@dataclass(slots=True)
class _OfTenant:
    """What one tenant has in the line, each in its order: places, jobs, and since when each of those counts as here."""

    places: list[_Place] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    since: list[float] = field(default_factory=list)


class Line:
    """Of one tenant, first come first, but for priorities. A job costs its rows by its steps.

    head_start_s: by which a job of high priority is before others of its tenant, and one of low priority behind.
    """

    def __init__(self, weigh: Weigh, *, head_start_s: float) -> None:
        self._weigh = weigh
        self._head_start_s = head_start_s
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
        """Behind those of its tenant that are at least as urgent."""
        tenant = job.request.tenant
        cost = float(max(1, job.rows * job.steps.total))
        self._added += 1
        place = self._order.tag(tenant, cost=cost, weight=self._weigh(tenant)), self._added
        since = self._since(job)
        own = self._tenants.setdefault(tenant, _OfTenant())
        at = bisect_right(own.since, since)
        own.since.insert(at, since)
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
        own.since.insert(0, -inf)
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
        del own.places[index], own.jobs[index], own.since[index]
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

    def _since(self, job: Job) -> float:
        """Since when it counts as here, on the monotonic clock."""
        return job.times.created_at - self._head_start_s * _EARLIER.get(job.request.priority, 0.0)

    def _place_if_added(self, job: Job) -> _Place:
        own = self._tenants.get(job.request.tenant)
        at = bisect_right(own.since, self._since(job)) if own is not None else 0
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
