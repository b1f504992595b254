"""Which webhook event is delivered next. Pure bookkeeping on the events' places; it reads and sends nothing.

Events of one tenant for one host are a lane. Deliveries at once are limited by lane, host and tenant and in all. A lane
whose last delivery failed makes one at a time, so a receiver that hangs holds one place until it answers again. Of the
lanes that may deliver, that of the tenant that was served longest ago comes first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from bottega.gateway.jobs.store import OutboxPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLimits:
    """Upper bounds on deliveries at the same time."""

    total: int
    per_tenant: int
    per_host: int


@dataclass(slots=True, kw_only=True)
class _Lane:
    tenant: str
    host: str
    due: list[tuple[float, str]] = field(default_factory=list)
    """Heap of due time and event ID. Entries that no longer agree with the event's place are outdated."""
    running: int = 0
    failing: bool = False


class DeliveryLanes:
    """The events that wait for their delivery, and the counts of those that were given up."""

    def __init__(self, limits: DeliveryLimits) -> None:
        self._limits = limits
        self._places: dict[str, OutboxPlace] = {}
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._in_flight: dict[str, OutboxPlace] = {}
        self._by_tenant, self._by_host, self._waiting_of = Counter[str](), Counter[str](), Counter[str]()
        self._served: dict[str, int] = {}
        self._turns = itertools.count(1)
        self._oldest: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._places) + len(self._in_flight)

    def waiting_of(self, tenant: str) -> int:
        """Return the number of a tenant's events that are not delivered yet."""
        return self._waiting_of[tenant]

    def is_in_flight(self, event_id: str) -> bool:
        """Return whether an event is being delivered."""
        return event_id in self._in_flight

    def oldest_wall(self) -> float | None:
        """Return when the job of the oldest undelivered event ended, in Unix seconds; None if there is none."""
        while self._oldest and not self._knows(self._oldest[0][1]):
            heapq.heappop(self._oldest)
        return self._oldest[0][0] if self._oldest else None

    def add(self, place: OutboxPlace) -> None:
        """Add an event, or give a waiting one another due time."""
        if place.event_id in self._in_flight:
            return
        if place.event_id not in self._places:
            self._waiting_of[place.tenant] += 1
            heapq.heappush(self._oldest, (place.created_wall, place.event_id))
        self._places[place.event_id] = place
        lane = self._lanes.setdefault((place.tenant, place.host), _Lane(tenant=place.tenant, host=place.host))
        heapq.heappush(lane.due, (place.due_steady, place.event_id))

    def begin(self, now: float) -> OutboxPlace | None:
        """Return the event to deliver now, and count its delivery; None if none is due or the limits are reached."""
        if len(self._in_flight) >= self._limits.total:
            return None
        lane = min(
            (lane for lane in self._ready(now)),
            key=lambda lane: (self._served.get(lane.tenant, 0), lane.due[0]),
            default=None,
        )
        if lane is None:
            return None
        _, event_id = heapq.heappop(lane.due)
        place = self._places.pop(event_id)
        self._in_flight[event_id] = place
        self._count(lane, 1)
        self._served[lane.tenant] = next(self._turns)
        return place

    def end(self, place: OutboxPlace, *, failed: bool) -> None:
        """Note that a delivery has ended. The event is forgotten; `add` makes it wait again."""
        del self._in_flight[place.event_id]
        self._waiting_of[place.tenant] -= 1
        lane = self._lanes[place.tenant, place.host]
        lane.failing = failed
        self._count(lane, -1)
        if not lane.running and not lane.due:
            del self._lanes[place.tenant, place.host]
        if not self._waiting_of[place.tenant]:
            del self._waiting_of[place.tenant]
            self._served.pop(place.tenant, None)

    def next_due(self) -> float | None:
        """Return the earliest due time of the lanes that the limits allow to deliver, or None."""
        if len(self._in_flight) >= self._limits.total:
            return None
        return min((lane.due[0][0] for lane in self._allowed()), default=None)

    def _ready(self, now: float) -> Iterator[_Lane]:
        return (lane for lane in self._allowed() if lane.due[0][0] <= now)

    def _allowed(self) -> Iterator[_Lane]:
        for lane in self._lanes.values():
            while lane.due and not self._is_current(*lane.due[0]):
                heapq.heappop(lane.due)
            if lane.due and self._has_room(lane):
                yield lane

    def _has_room(self, lane: _Lane) -> bool:
        return (
            not (lane.failing and lane.running)
            and self._by_tenant[lane.tenant] < self._limits.per_tenant
            and self._by_host[lane.host] < self._limits.per_host
        )

    def _is_current(self, due_steady: float, event_id: str) -> bool:
        place = self._places.get(event_id)
        return place is not None and place.due_steady == due_steady

    def _knows(self, event_id: str) -> bool:
        return event_id in self._places or event_id in self._in_flight

    def _count(self, lane: _Lane, change: int) -> None:
        lane.running += change
        for counts, key in ((self._by_tenant, lane.tenant), (self._by_host, lane.host)):
            counts[key] += change
            if not counts[key]:
                del counts[key]
