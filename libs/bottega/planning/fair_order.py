"""The order in which tenants' work is served so that each gets its share by weight, whoever asks for how much.

Start-time fair queueing: a piece of work is tagged with the virtual time at which its tenant's work before it would be
done, and the least tag is served first. A tenant that asks for little is behind at most one piece of each of the
others, however many those have waiting; one that was idle gets no credit for it. Source: Goyal, Vin and Cheng,
"Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations


class FairOrder:
    """Tags of one line. With one tenant they are in the order of asking. Keeps a number for each tenant with work."""

    def __init__(self) -> None:
        self._now = 0.0
        self._done_at: dict[str, float] = {}

    def tag(self, tenant: str, *, cost: float, weight: float = 1.0) -> float:
        """Of a new piece of work. cost: in any unit, the same for all; weight: of the tenant, above 0."""
        begins = self.next_tag(tenant)
        self._done_at[tenant] = begins + cost / weight
        return begins

    def next_tag(self, tenant: str) -> float:
        """Which the tenant's next piece of work would have."""
        return max(self._now, self._done_at.get(tenant, 0.0))

    def served(self, tag: float) -> None:
        """What has that tag is served now."""
        if tag > self._now:
            self._now = tag
            self._done_at = {tenant: at for tenant, at in self._done_at.items() if at > tag}

    def idle(self) -> None:
        """Nothing waits any more: what was asked for until now counts for nobody."""
        self._now = max(self._done_at.values(), default=self._now)
        self._done_at.clear()
