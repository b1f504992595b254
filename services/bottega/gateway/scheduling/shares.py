"""Which tenants have less of what runs than their share: a job of theirs need not wait for a place that another has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from bottega.gateway.scheduling.line import Weigh


class RunningShares:
    """Of one model, for one look at its queue.

    running: attempts by tenant. waiting: tenants of the jobs that wait. Those that have neither get no share.
    """

    def __init__(self, running: Mapping[str, int], waiting: Collection[str], weigh: Weigh) -> None:
        tenants = running.keys() | set(waiting)
        self._contended = len(tenants) > 1
        self._weights = {tenant: weigh(tenant) for tenant in tenants} if self._contended else {}
        self._weight = sum(self._weights.values())
        self._running = Counter(running) if self._contended else Counter[str]()

    def claim(self, tenant: str) -> bool:
        """Whether a tenant has at most its share with one job more, which counts from now on if so."""
        if not self._contended:
            return False
        jobs, of = self._running[tenant] + 1, self._running.total() + 1
        if jobs * self._weight > of * self._weights[tenant]:
            return False
        self._running[tenant] = jobs
        return True
