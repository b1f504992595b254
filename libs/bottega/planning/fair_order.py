"""The order in which tenants' work is served so that each gets its share by weight, whoever asks for how much.

Start-time fair queueing: a piece of work is tagged with the virtual time at which its tenant's work before it would be
done, and the least tag is served first. A tenant that asks for little is behind at most one piece of each of the
others, however many those have waiting; one that was idle gets no more credit for it than the line allows. Source:
Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Whose work it is, and what the tenant weighs relative to others, above 0. Without tenants all is of one, ""."""

    tenant: str = ""
    weight: float = 1.0


class FairOrder:
    """Tags of one line. With one tenant they are in the order of asking. Keeps a number for each tenant with work.

    credit: how far a tenant that asked for less than its share may be behind and catch up, as cost over weight; a
    tenant that comes anew is so far behind.
    """

    def __init__(self, *, credit: float = 0.0) -> None:
        self._credit = credit
        self._now = 0.0
        self._done_at: dict[str, float] = {}

    def tag(self, tenant: str, *, cost: float, weight: float = 1.0) -> float:
        """Of a new piece of work. cost: in any unit, the same for all; weight: of the tenant, above 0."""
        begins = self.next_tag(tenant)
        self._done_at[tenant] = begins + cost / weight
        return begins

    def next_tag(self, tenant: str) -> float:
        """Which the tenant's next piece of work would have."""
        least = self._now - self._credit
        return max(least, self._done_at.get(tenant, least))

    def served(self, tag: float) -> None:
        """What has that tag is served now."""
        if tag > self._now:
            self._now = tag
            least = tag - self._credit
            self._done_at = {tenant: at for tenant, at in self._done_at.items() if at > least}

    def idle(self) -> None:
        """Nothing waits any more: what was asked for until now counts for nobody."""
        self._now = max(self._done_at.values(), default=self._now)
        self._done_at.clear()
