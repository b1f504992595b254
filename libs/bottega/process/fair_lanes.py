"""The lanes of a pool, given to calls by tenant and by the seconds that calls take in them.

Lanes are processes, each of which serves one call at a time. Of the tenants whose calls wait, the one that has used
least of the lanes for its weight is next (bottega.fair_order). A call is charged what it is expected to take
when it begins, and what it took when it ends, so that nobody gains by a call that takes longer than its header says.
One of several lanes never serves large calls, so that small ones get on whatever is sent beside them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bottega.fair_order import FairOrder, Share, fair_room

LaneT = TypeVar("LaneT")

# Of the room for calls that wait, what a tenant may have alone while no other has any.
_TENANT_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNeed:
    """The owner of a call to a pool, and the time that it is expected to take."""

    share: Share = field(default_factory=Share)
    """The tenant and its weight. A pool without tenants serves all calls first come, first served."""
    expected_s: float = 1.0
    """Seconds that it is expected to take."""
    large: bool = False
    """Whether the call may occupy a lane for long."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter(Generic[LaneT]):
    need: CallNeed
    number: int
    lane: asyncio.Future[LaneT]


class FairLanes(Generic[LaneT]):
    """A scheduler that assigns lanes to calls, in one event loop.

    Args:
        lanes: All of them; the first of several serves small calls alone.
        max_waiting: Number of calls that may wait for a lane, half of them large. The more wait, the fewer of them may
            be one tenant's.
    """

    def __init__(self, lanes: Sequence[LaneT], max_waiting: int) -> None:
        self._for_small = lanes[0] if len(lanes) > 1 else None
        self._free = list(lanes)
        self._max_waiting = max_waiting
        self._order = FairOrder()
        self._waiting: dict[str, deque[_Waiter[LaneT]]] = {}
        self._arrived = 0
        self._unsettled = 0

    def __len__(self) -> int:
        """Return the number of calls that wait."""
        return sum(map(len, self._waiting.values()))

    async def acquire(self, need: CallNeed) -> LaneT:
        """Return a lane when it is the call's turn; `settle` and `release` it.

        Raises:
            asyncio.QueueFull: If no more calls may wait, or none of this tenant.
        """
        for lane in self._free:
            if self._may_serve(lane, need):
                self._free.remove(lane)
                self._charge(need)
                return lane
        if not self._has_room(need):
            raise asyncio.QueueFull
        self._arrived += 1
        future: asyncio.Future[LaneT] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(need=need, number=self._arrived, lane=future)
        self._waiting.setdefault(need.share.tenant, deque()).append(waiter)
        try:
            return await waiter.lane
        except asyncio.CancelledError:
            if not waiter.lane.done() or waiter.lane.cancelled():
                self._forget(waiter)
            elif waiter.lane.exception() is None:  # it came when its caller had gone
                self.settle(need, 0.0)
                self.release(waiter.lane.result())
            raise

    def settle(self, need: CallNeed, took_s: float) -> None:
        """Charge the seconds that an ended call took, in place of the expected seconds."""
        self._order.charge(need.share.tenant, cost=took_s - need.expected_s, weight=need.share.weight)
        self._unsettled -= 1
        if not self._unsettled and not self._waiting:
            self._order.idle()

    def release(self, lane: LaneT) -> None:
        """Give the lane to the next call that it may serve, or keep it free."""
        waiter = self._next_for(lane)
        if waiter is not None:
            self._forget(waiter)
            self._charge(waiter.need)
            waiter.lane.set_result(lane)
            return
        # Small calls take the lane that no large one may have before they take another.
        self._free.insert(0 if lane is self._for_small else len(self._free), lane)

    def acquire_free(self) -> list[LaneT]:
        """Return the lanes that serve no call. Release them."""
        free, self._free = self._free, []
        return free

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """Fail all calls that wait."""
        waiting, self._waiting = self._waiting, {}
        for line in waiting.values():
            for waiter in line:
                if not waiter.lane.done():
                    waiter.lane.set_exception(error())

    def _next_for(self, lane: LaneT) -> _Waiter[LaneT] | None:
        """Return the first call of the tenant that has used least, of those that may have this lane."""
        firsts = (self._first_for(lane, line) for line in self._waiting.values())
        return min(
            (waiter for waiter in firsts if waiter is not None),
            key=lambda waiter: (self._order.next_tag(waiter.need.share.tenant), waiter.number),
            default=None,
        )

    def _first_for(self, lane: LaneT, line: deque[_Waiter[LaneT]]) -> _Waiter[LaneT] | None:
        return next((each for each in line if self._may_serve(lane, each.need) and not each.lane.done()), None)

    def _charge(self, need: CallNeed) -> None:
        # No later than any that waits: small calls that pass large ones by make these wait no longer afterwards.
        self._order.served(min(map(self._order.next_tag, {need.share.tenant, *self._waiting})))
        self._order.charge(need.share.tenant, cost=need.expected_s, weight=need.share.weight)
        self._unsettled += 1

    def _forget(self, waiter: _Waiter[LaneT]) -> None:
        tenant = waiter.need.share.tenant
        line = self._waiting.get(tenant)
        if line is not None and waiter in line:
            line.remove(waiter)
            if not line:
                del self._waiting[tenant]

    def _may_serve(self, lane: LaneT, need: CallNeed) -> bool:
        return not need.large or lane is not self._for_small

    def _has_room(self, need: CallNeed) -> bool:
        own = self._waiting.get(need.share.tenant, ())
        if not _leaves_room(self._max_waiting - len(self), len(own), need.share.tenant):
            return False
        if not need.large:
            return True
        large = sum(waiter.need.large for line in self._waiting.values() for waiter in line)
        free = max(1, self._max_waiting // 2) - large
        return _leaves_room(free, sum(waiter.need.large for waiter in own), need.share.tenant)


def _leaves_room(free: int, held: int, tenant: str) -> bool:
    """Return whether one more call may wait; where tenants have names, some room is left for others."""
    return fair_room(free=free, held=held, share=_TENANT_SHARE) > 0 if tenant else free > 0
