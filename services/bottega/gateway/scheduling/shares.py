"""Which tenants have less of what runs than their share: a job of theirs need not wait for a place that another has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from bottega.gateway.scheduling.line import Weigh


class RunningShares:
    """Of one model, for one look at its queue.

    running: attempts by tenant. waiting: tenants of the jobs that wait. Those that have neither get no share.
    may_begin: how many jobs more of a tenant may run; None is without bound.
    contended: whether several tenants have jobs.
    """

    def __init__(
        self,
        running: Mapping[str, int],
        waiting: Collection[str],
        weigh: Weigh,
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
        """Whether a job of a tenant may run now; it counts if so."""
        if tenant not in self._left:
            self._left[tenant] = self._may_begin(tenant)
        left = self._left[tenant]
        if left is None:
            return True
        self._left[tenant] = left - 1
        return left > 0

    def has_none(self, tenant: str) -> bool:
        """Return whether no job of a tenant runs while others have jobs."""
        return self.contended and not self._running[tenant]

    def claim(self, tenant: str) -> bool:
        """Whether a tenant has at most its share with one job more, which counts from now on if so."""
        if not self.contended:
            return False
        jobs, of = self._running[tenant] + 1, self._running.total() + 1
        if jobs * self._weight > of * self._weights[tenant]:
            return False
        self._running[tenant] = jobs
        return True
