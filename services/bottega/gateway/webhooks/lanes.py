"""Which webhook event is delivered next. Pure bookkeeping on the events' places; it reads and sends nothing.

Events of one tenant for one host are a lane. Deliveries at once are limited by lane, host and tenant and in all. A lane
whose last delivery failed makes one at a time, so a receiver that hangs holds one place until it answers again. Of the
lanes that may deliver, that of the tenant that was served longest ago comes first.

A lane is in one queue at most, so that the next event is found without a look at the others: by its due time until it
is due; then among the ready lanes of its tenant; or, while its host has as many deliveries as it may, among the lanes
that wait for that host. A lane without events, or with a failing receiver that is being called, is in none.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bottega.gateway.jobs.store import OutboxEvent, OutboxPlace

KeyT = TypeVar("KeyT", str, tuple[str, str])

_MIN_OUTDATED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLimits:
    """Upper bounds on deliveries at the same time."""

    total: int
    per_tenant: int
    per_host: int


class _Queue(Generic[KeyT]):
    """A priority queue whose entries can be moved and removed. Its memory is proportional to its length."""

    def __init__(self) -> None:
        self._priorities: dict[KeyT, float] = {}
        self._heap: list[tuple[float, KeyT]] = []

    def __len__(self) -> int:
        return len(self._priorities)

    def first(self) -> tuple[float, KeyT] | None:
        """Return the lowest priority and its entry; None if the queue is empty."""
        while self._heap and self._priorities.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def put(self, key: KeyT, priority: float) -> None:
        """Add an entry, or move it."""
        if self._priorities.get(key) != priority:
            self._priorities[key] = priority
            heapq.heappush(self._heap, (priority, key))
            self._trim()

    def discard(self, key: KeyT) -> None:
        """Remove an entry if it is in the queue."""
        if self._priorities.pop(key, None) is not None:
            self._trim()

    def _trim(self) -> None:
        if len(self._heap) > 2 * len(self._priorities) + _MIN_OUTDATED:
            self._heap = [(priority, key) for key, priority in self._priorities.items()]
            heapq.heapify(self._heap)


@dataclass(slots=True, kw_only=True)
class _Lane:
    tenant: str
    host: str
    due: _Queue[str] = field(default_factory=_Queue[str])
    """Waiting events by due time."""
    running: int = 0
    failing: bool = False


class DeliveryLanes:
    """The events that wait for their delivery, and those in flight."""

    def __init__(self, limits: DeliveryLimits) -> None:
        self._limits = limits
        self._places: dict[str, OutboxPlace] = {}
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._in_flight: dict[str, OutboxPlace] = {}
        self._by_tenant, self._by_host, self._waiting_of = Counter[str](), Counter[str](), Counter[str]()
        self._served: dict[str, int] = {}
        self._turns = itertools.count(1)
        self._oldest = _Queue[str]()
        self._later = _Queue[tuple[str, str]]()
        """Lanes by due time."""
        self._ready: dict[str, _Queue[tuple[str, str]]] = {}
        """Lanes that are due, by tenant."""
        self._for_host: dict[str, _Queue[tuple[str, str]]] = {}
        """Lanes that wait for a host."""
        self._next_tenants = _Queue[str]()
        """Tenants with ready lanes, and with fewer deliveries than they may have. Served longest ago first."""

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
        oldest = self._oldest.first()
        return None if oldest is None else oldest[0]

    def add(self, place: OutboxPlace) -> None:
        """Add an event, or give a waiting one another due time."""
        if place.event_id in self._in_flight:
            return
        if place.event_id not in self._places:
            self._waiting_of[place.tenant] += 1
            self._oldest.put(place.event_id, place.created_wall)
        self._places[place.event_id] = place
        lane = self._lanes.setdefault((place.tenant, place.host), _Lane(tenant=place.tenant, host=place.host))
        lane.due.put(place.event_id, place.due_steady)
        self._queue(lane)

    def begin(self, now: float) -> OutboxPlace | None:
        """Return the event to deliver now, and count its delivery; None if none is due or the limits are reached."""
        if len(self._in_flight) >= self._limits.total:
            return None
        while (later := self._later.first()) is not None and later[0] <= now:
            self._make_ready(later[1])
        lane = self._next_lane()
        if lane is None:
            return None
        first = lane.due.first()
        assert first is not None
        lane.due.discard(first[1])
        place = self._places.pop(first[1])
        self._in_flight[place.event_id] = place
        self._served[lane.tenant] = next(self._turns)
        self._count(lane, 1)
        return place

    def end(self, place: OutboxPlace, *, failed: bool) -> None:
        """Note that a delivery has ended. The event is forgotten; `add` makes it wait again."""
        del self._in_flight[place.event_id]
        self._oldest.discard(place.event_id)
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
        """Return when to call `begin` again after it returned None; None if only the end of a delivery can help."""
        if len(self._in_flight) >= self._limits.total:
            return None
        later = self._later.first()
        return None if later is None else later[0]

    def _next_lane(self) -> _Lane | None:
        """Return the ready lane whose turn it is."""
        while True:
            hosts = [host for host in self._for_host if self._by_host[host] < self._limits.per_host]
            for host in hosts:
                self._make_ready(_first_of(self._for_host[host]))
            while (tenant := self._next_tenants.first()) is not None:
                lane = self._lanes[_first_of(self._ready[tenant[1]])]
                if self._by_host[lane.host] < self._limits.per_host:
                    return lane
                self._leave_queues(lane)
                waiting = self._for_host.setdefault(lane.host, _Queue[tuple[str, str]]())
                waiting.put((lane.tenant, lane.host), tenant[0])
            if not hosts:
                return None

    def _queue(self, lane: _Lane) -> None:
        """Put a lane into the queue by due time, or into none."""
        self._leave_queues(lane)
        first = lane.due.first()
        if first is not None and not (lane.failing and lane.running):
            self._later.put((lane.tenant, lane.host), first[0])

    def _make_ready(self, key: tuple[str, str]) -> None:
        lane = self._lanes[key]
        self._leave_queues(lane)
        first = lane.due.first()
        assert first is not None
        self._ready.setdefault(lane.tenant, _Queue[tuple[str, str]]()).put(key, first[0])
        self._set_turn(lane.tenant)

    def _leave_queues(self, lane: _Lane) -> None:
        key = lane.tenant, lane.host
        self._later.discard(key)
        for queues, name in ((self._ready, lane.tenant), (self._for_host, lane.host)):
            if name in queues:
                queues[name].discard(key)
                if not queues[name]:
                    del queues[name]
        self._set_turn(lane.tenant)

    def _set_turn(self, tenant: str) -> None:
        if tenant in self._ready and self._by_tenant[tenant] < self._limits.per_tenant:
            self._next_tenants.put(tenant, self._served.get(tenant, 0))
        else:
            self._next_tenants.discard(tenant)

    def _count(self, lane: _Lane, change: int) -> None:
        """Change the number of a lane's deliveries, and queue it accordingly."""
        lane.running += change
        for counts, key in ((self._by_tenant, lane.tenant), (self._by_host, lane.host)):
            counts[key] += change
            if not counts[key]:
                del counts[key]
        self._queue(lane)


def _first_of(queue: _Queue[KeyT]) -> KeyT:
    first = queue.first()
    assert first is not None
    return first[1]


def place_of(event: OutboxEvent) -> OutboxPlace:
    """Return what the lanes need to know of an event."""
    return OutboxPlace(
        number=0,
        event_id=event.event_id,
        tenant=event.tenant,
        host=event.host,
        due_steady=event.due_steady,
        created_wall=event.created_wall,
        attempts=event.attempts,
        dead=event.dead,
    )
