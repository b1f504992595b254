"""Fair queueing of tenants' work: each tenant gets its share by weight, however much the others request.

It is start-time fair queueing. A piece of work is tagged with the virtual time at which its tenant's earlier work would
be done, and the lowest tag is served first. A tenant that requests little waits for at most one piece of each other
tenant. A tenant that was idle gets an advantage of at most `credit`. Source: Goyal, Vin and Cheng, "Start-time Fair
Queuing", SIGCOMM 1996.

A turn of one tenant is kept short if it would delay another one much longer than its own turns take (`TurnLengths`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

# A turn is too long if it takes this many times as long as another tenant's.
_LONG_TURN = 4.0
# How long a tenant is expected back, in seconds of the device: after its first visit, and at most. Shorter turns cost
# throughput, so a single small picture must not keep them short for minutes.
_FIRST_RETURN_S, _MAX_RETURN_S = 10.0, 600.0
# Short turns cost next to nothing if they take together at most this many times as long as the long turn.
_CHEAP_PARTS = 1.1


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

    def __init__(self) -> None:
        self.credit = 0.0
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


@dataclass(slots=True, kw_only=True)
class _Visitor:
    """A tenant whose requests have run and who is here or may come back. Times count device seconds."""

    last_s: float
    """End of its last turn."""
    turn_s: float
    """Expected length of its last turn."""
    return_s: float = _FIRST_RETURN_S
    """Seconds after its last turn for which it is expected back."""

    def come_back(self, now_s: float) -> None:
        """Expect the tenant for twice as long as it stayed away this time, but at least half as long as before."""
        away_s = now_s - self.last_s
        self.return_s = min(max(2 * away_s, self.return_s / 2, _FIRST_RETURN_S), _MAX_RETURN_S)


class TurnLengths:
    """How long the turns are of the tenants that are here or may come back, to keep others' turns as short.

    Args:
        here: The tenants that have work here now; it changes with them.
    """

    def __init__(self, here: Container[str]) -> None:
        self._here = here
        self._visitors: dict[str, _Visitor] = {}  # The tenant whose turn was last comes last.
        self._device_s = 0.0

    def arrived(self, tenant: str) -> None:
        """Note that a tenant has work again after it had none."""
        if tenant in self._visitors:
            self._visitors[tenant].come_back(self._device_s)

    def note_turn(self, tenant: str, turn_s: float) -> None:
        """Record a tenant's turn, and remove tenants that have stayed away for long."""
        self._device_s += turn_s
        visitor = self._visitors.pop(tenant, None) or _Visitor(last_s=self._device_s, turn_s=turn_s)
        visitor.last_s, visitor.turn_s = self._device_s, turn_s
        self._visitors[tenant] = visitor
        for name in list(self._visitors):
            if self._visitors[name].last_s >= self._device_s - _MAX_RETURN_S:
                return
            if name not in self._here:
                del self._visitors[name]

    def is_long(self, seconds: float) -> bool:
        """Return whether work takes longer than a turn of one of several tenants that are here or were here lately.

        Only work that can pause at no cost ends for that.
        """
        turns_s = [visitor.turn_s for visitor in self._visitors.values()]
        return len(turns_s) > 1 and seconds > min(turns_s)

    def delays_another(self, tenant: str, turn_s: float, parts_s: float) -> bool:
        """Return whether a turn of a tenant is much longer than those of another that is here or expected back.

        Args:
            turn_s: Seconds of the turn.
            parts_s: Seconds of short turns in its place. If they are about as many, also tenants count that were here
                lately.
        """
        cheap = parts_s <= _CHEAP_PARTS * turn_s
        others = (
            visitor.turn_s
            for name, visitor in self._visitors.items()
            if name != tenant and (cheap or self._expects(name))
        )
        return turn_s > _LONG_TURN * min(others, default=turn_s)

    def _expects(self, tenant: str) -> bool:
        visitor = self._visitors[tenant]
        return tenant in self._here or visitor.last_s + visitor.return_s >= self._device_s


def fair_room(*, free: float, held: int, share: float) -> float:
    """Return how many more places a tenant or peer may take that has `held`, while `free` are free; 0 or less for none.

    The more places are taken, the fewer each may have, so that a newcomer finds some.

    Args:
        share: Part of all places that one may have if it is the only one, in (0, 1]. With 1 each may have all.

    Source: Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998.
    """
    return share * free - (1 - share) * held
