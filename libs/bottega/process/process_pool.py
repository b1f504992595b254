"""A pool of child processes with limits, and a bounded queue. Each process serves one call at a time.

The scheduler calls the processes lanes. It gives them to calls by tenant and by the seconds that calls take. Of the
tenants whose calls wait, the one that has used least for its weight is next (bottega.fair_order). A call is charged its
expected seconds when it starts, and its actual seconds when it ends, so that nobody gains by a call that takes longer
than its header says. If there are several lanes, one never serves large calls, so that large ones do not delay small
ones.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bottega.background_tasks import BackgroundTasks
from bottega.errors import QueueFull, Unavailable
from bottega.fair_order import FairOrder, Share, fair_room
from bottega.process.limited_process import LimitedProcess, ProcessLost, ProcessSpec

LaneT = TypeVar("LaneT")
ResultT = TypeVar("ResultT")

# Share of the queue that a tenant may use while no other tenant has calls in it.
_TENANT_SHARE = 0.75

# Number of recent calls over which the duration of one is measured.
_PACE_CALLS = 16
_MIN_RETRY_S = 0.5
# A caller that retries after this share of the queue was served finds a place.
_RETRY_SHARE = 0.1
# Ratio of the longest to the shortest suggested pause: callers that were refused together do not retry together.
_SPREAD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class CallNeed:
    """The tenant of a call to a pool, and the time that the call is expected to take."""

    share: Share = field(default_factory=Share)
    """The tenant and its weight. If there are no tenants, all calls are served first come, first served."""
    expected_s: float = 1.0
    """Seconds that the call is expected to take."""
    large: bool = False
    """Whether the call may occupy a process for long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """Limits of a pool."""

    processes: int
    """Number of processes."""
    max_waiting: int
    """Upper bound on calls that wait for a process. Half of them may be large."""
    max_wait_s: float | None = None
    """Longest time in seconds that a call may wait; None means as long as its caller does."""
    limit: str
    """Name of these limits in a refusal."""
    waiting: str
    """Plural noun for the waiting calls, in error messages."""
    attempts: int = 2
    """Number of attempts at a call whose process was lost by accident."""
    new_process: bool = False
    """Whether each call gets a new process."""
    idle_s: float | None = None
    """Seconds without a call after which processes end until the next call. None: never, and `start` starts all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """A frame to send to a process, and resource limits for a process that is started for this call."""

    frame: bytes
    limits: Mapping[int, int] = field(default_factory=dict)
    """Limits by `resource.RLIMIT_...` number, in addition to those of the ProcessSpec.

    They apply only if the call starts its process, so pools that use them set `new_process`.
    """


class ProcessPool:
    """A pool of processes, which start with `start` or on demand. Call `stop` after the last call."""

    def __init__(self, spec: ProcessSpec, limits: PoolLimits) -> None:
        self._spec = spec
        self._limits = limits
        self._processes = [LimitedProcess(spec) for _ in range(limits.processes)]
        self._queue = FairLanes(self._processes, limits.max_waiting)
        self._took_s: deque[float] = deque(maxlen=_PACE_CALLS)
        self._calls = BackgroundTasks(f"calls of the {spec.name}")
        self._idle: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def pids(self) -> list[int]:
        """IDs of the running processes."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Start all processes and wait until they are ready.

        A process that serves a call already starts with that call.

        Does nothing if processes end when they are idle. Raises InternalError if one does not start, and Unavailable.
        """
        if self._limits.idle_s is None:
            await self._until_stopped(self._start_all())

    async def stop(self) -> None:
        """End the processes. Calls that wait or run fail with Unavailable."""
        self._stopped = True
        self._stay_awake()
        self._queue.fail_all(_stopping)
        await self._calls.cancel()
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def call(self, prepare: Callable[[], Awaitable[PreparedCall]], *, need: CallNeed | None = None) -> bytes:
        """Call `prepare` when it is the call's turn, send its frame to a process, and return the answer.

        A call that has started runs to its end even if its caller is cancelled; only a new process of its own ends with
        the caller. Raises ProcessLost, QueueFull with the time to retry, Unavailable, InternalError, and the errors of
        `prepare`.
        """
        if self._stopped:
            raise _stopping()
        need = need or CallNeed()
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                process = await self._queue.acquire(need)
        except (TimeoutError, asyncio.QueueFull):
            raise self._full() from None
        return await self._until_stopped(self._serve(process, prepare, need), shielded=not self._limits.new_process)

    async def _until_stopped(self, work: Coroutine[Any, Any, ResultT], *, shielded: bool = False) -> ResultT:
        """Return the result of `work`. Raises Unavailable if the pool stops first.

        Args:
            shielded: Whether `work` continues if its caller is cancelled.
        """
        if self._stopped:  # the pool stopped since the caller last ran
            work.close()
            raise _stopping()
        try:
            return await (self._calls.run_shielded(work) if shielded else self._calls.run(work))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise _stopping() from None

    async def _start_all(self) -> None:
        """Start all free processes.

        Calls that arrive meanwhile wait, because the first frame of a process is not their answer.
        """
        await asyncio.gather(*(self._start(process) for process in self._queue.acquire_free()))

    async def _start(self, process: LimitedProcess) -> None:
        try:
            await process.start()
        finally:
            self._queue.release(process)

    async def _serve(
        self, process: LimitedProcess, prepare: Callable[[], Awaitable[PreparedCall]], need: CallNeed
    ) -> bytes:
        self._stay_awake()
        began_s = time.monotonic()
        try:
            return await self._exchange(process, await prepare())
        finally:
            try:
                if self._limits.new_process:
                    await process.stop()
            finally:
                took_s = time.monotonic() - began_s
                self._took_s.append(took_s)
                self._queue.settle(need, took_s)
                self._queue.release(process)
                self._rest()

    async def _exchange(self, process: LimitedProcess, call: PreparedCall) -> bytes:
        attempt = 1
        while True:
            try:
                return await process.exchange(call.frame, call.limits)
            except ProcessLost as lost:
                if attempt == self._limits.attempts or not lost.loss.may_be_chance:
                    raise
                attempt += 1

    def _full(self) -> QueueFull:
        return QueueFull(
            f"too many {self._limits.waiting}; retry",
            metadata={"limit": self._limits.limit},
            retry_after_s=random.uniform(1.0, _SPREAD) * self._due_s(),
        )

    def _due_s(self) -> float:
        """Return the seconds until about a tenth of the queue is served, at the pace of recent calls."""
        call_s = sum(self._took_s) / len(self._took_s) if self._took_s else self._spec.deadline_s
        calls = max(1.0, _RETRY_SHARE * len(self._queue))
        return min(max(calls * call_s / len(self._processes), _MIN_RETRY_S), self._spec.deadline_s)

    def _stay_awake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _rest(self) -> None:
        """End the processes after the idle time, unless another call arrives."""
        self._stay_awake()
        if self._limits.idle_s is not None and not self._stopped:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._limits.idle_s, lambda: self._calls.start(self._end_free()))

    async def _end_free(self) -> None:
        free = self._queue.acquire_free()
        try:
            await asyncio.gather(*(process.stop() for process in free))
        finally:
            for process in free:
                self._queue.release(process)


def _stopping() -> Unavailable:
    return Unavailable("the service is stopping")


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter(Generic[LaneT]):
    need: CallNeed
    number: int
    lane: asyncio.Future[LaneT]


class FairLanes(Generic[LaneT]):
    """Assigns lanes (processes) to calls, in one event loop.

    Args:
        lanes: All lanes. If there are several, the first one serves only small calls.
        max_waiting: Upper bound on the calls that wait for a lane. Half of them may be large. The more wait, the fewer
            of them may belong to one tenant.
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
        """Wait for the call's turn and return a lane; then `settle` the call and `release` the lane.

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
        """Replace the expected seconds in a call's charge by the seconds that it took."""
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
        """Return the lanes that serve no call. The caller must release them."""
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
        """Return the first call of the tenant that has used least, among the calls that this lane may serve."""
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
    """Return whether one more call may wait. For a named tenant, some places are left for others."""
    return fair_room(free=free, held=held, share=_TENANT_SHARE) > 0 if tenant else free > 0
