"""The jobs that wait for one model, in the order in which their tenants' shares let them be served."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from math import inf

from bottega.gateway.jobs.job import Job
from bottega.planning import FairOrder

Weigh = Callable[[str], float]
"""The weight of a tenant, by its name; above 0."""


def equal_weights(tenant: str) -> float:
    """A Weigh to which all tenants are the same."""
    del tenant
    return 1.0


# Of a place: of equal tags the job comes first that came first.
_Place = tuple[float, int]


class Line:
    """Of one tenant, first come first. A job costs its rows by its steps."""

    def __init__(self, weigh: Weigh) -> None:
        self._weigh = weigh
        self._order = FairOrder()
        self._places: list[_Place] = []
        self._jobs: list[Job] = []
        self._place_of: dict[str, _Place] = {}
        self._tenants = Counter[str]()
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
        """Behind those of its tenant."""
        tenant = job.request.tenant
        cost = float(max(1, job.rows * job.steps.total))
        self._insert(job, self._order.tag(tenant, cost=cost, weight=self._weigh(tenant)))

    def add_first(self, job: Job) -> None:
        """Before all others: it had its turn, and was lost."""
        self._added += 1
        self._put(job, (-inf, -self._added))

    def remove(self, job: Job) -> None:
        """It is served, or does not wait any more."""
        place = self._place_of.pop(job.job_id)
        at = bisect_left(self._places, place)
        del self._places[at], self._jobs[at]
        self._tenants[job.request.tenant] -= 1
        if not self._tenants[job.request.tenant]:
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
        place = self._place_of.get(job.job_id)
        place = place or (self._order.next_tag(job.request.tenant), self._added + 1)
        end = bisect_left(self._places, place)
        return self._jobs[:end]

    def _insert(self, job: Job, tag: float) -> None:
        self._added += 1
        self._put(job, (tag, self._added))

    def _put(self, job: Job, place: _Place) -> None:
        at = bisect_left(self._places, place)
        self._places.insert(at, place)
        self._jobs.insert(at, job)
        self._place_of[job.job_id] = place
        self._tenants[job.request.tenant] += 1
