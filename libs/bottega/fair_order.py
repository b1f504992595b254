"""Fair queueing of tenants' work: each tenant gets its share by weight, however much the others request.

It is start-time fair queueing. A piece of work is tagged with the virtual time at which its tenant's earlier work would
be done, and the lowest tag is served first. A tenant that requests little waits for at most one piece of each other
tenant. A tenant that was idle gets an advantage of at most `credit`. Source: Goyal, Vin and Cheng, "Start-time Fair
Queuing", SIGCOMM 1996.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A tenant and its weight relative to others, above 0. Where there are no tenants, all work belongs to ""."""

    tenant: str = ""
    weight: float = 1.0


class FairOrder:
    """The tags of one queue.

    With one tenant they are in the order of arrival. It stores one value for each tenant that has work.

    Attributes:
        credit: How much a tenant that used less than its share may catch up, as cost over weight. A new tenant gets the
            whole credit.
    """

    def __init__(self, *, credit: float = 0.0) -> None:
        self.credit = credit
        self._now = 0.0
        self._done_at: dict[str, float] = {}

    def charge(self, tenant: str, *, cost: float, weight: float = 1.0) -> None:
        """Charge a tenant for work that begins, or correct the charge for work that has ended.

        Args:
            cost: Cost in any unit, the same for all. Negative to correct a charge that was too high.
            weight: The tenant's weight, above 0.
        """
        self._done_at[tenant] = self.next_tag(tenant) + cost / weight

    def next_tag(self, tenant: str) -> float:
        """Return the tag of the tenant's next piece of work."""
        least = max(self._now - self.credit, 0.0)  # nobody was behind before the first piece of work
        return max(least, self._done_at.get(tenant, least))

    def begin_alone(self, tenant: str) -> None:
        """Record that a tenant has work while no other has any, so that it gets no credit."""
        self._done_at[tenant] = max(self._now, self._done_at.get(tenant, self._now))

    def served(self, tag: float) -> None:
        """Record that the work with this tag is being served."""
        if tag > self._now:
            self._now = tag
            least = tag - self.credit
            self._done_at = {tenant: at for tenant, at in self._done_at.items() if at > least}

    def idle(self) -> None:
        """Reset the usage of all tenants, because the queue is empty."""
        self._now = max(self._done_at.values(), default=self._now)
        self._done_at.clear()


def fair_room(*, free: float, held: int, share: float) -> float:
    """Return how many more places a tenant or peer may take that has `held`, while `free` are free; 0 or less for none.

    The more places are taken, the fewer each may have, so that a newcomer finds some.

    Args:
        share: Part of all places that one may have if it is the only one, in (0, 1]. With 1 each may have all.

    Source: Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998.
    """
    return share * free - (1 - share) * held
