"""A pool of child processes behind limits, and the bounded queue before them. Each process serves one call at a time.

Which call is next is decided by `fair_lanes`: tenants share the processes by the seconds that their calls take.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bottega.background_tasks import BackgroundTasks
from bottega.errors import QueueFull, Unavailable
from bottega.process.fair_lanes import CallNeed, FairLanes
from bottega.process.limited_process import LimitedProcess, ProcessLost, ProcessSpec

ResultT = TypeVar("ResultT")

# Calls over which the time of one is measured.
_PACE_CALLS = 16
_MIN_RETRY_S = 0.5
# A caller that comes back after this share of the queue has gone finds room beside the others that wait.
_RETRY_SHARE = 0.1
# Longest time that is asked for, over the shortest: callers that were refused together should not come back together.
_SPREAD = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """processes: that run at once. max_waiting: calls that may wait for one, half of them large. max_wait_s: that one
    may wait; None: as long as its caller does. limit: the name of these bounds in a refusal. waiting: what waits, for
    people.

    attempts: at a call whose process was lost by chance. new_process: each call has one of its own. idle_s: without a
    call, after which processes end, and the next one starts its own; None is never, and `start` starts all.
    """

    processes: int
    max_waiting: int
    max_wait_s: float | None = None
    limit: str
    waiting: str
    attempts: int = 2
    new_process: bool = False
    idle_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """What a process is sent. limits: of a process of its own, beside those of its spec."""

    frame: bytes
    limits: Mapping[int, int] = field(default_factory=dict)


class ProcessPool:
    """Processes start with `start`, or when they are first needed; `stop` after the last call."""

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
        """Ids of the processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Returns when all processes are ready but those that serve a call already, which starts its own. Nothing for
        those that end when they are idle.

        Raises InternalError when one does not start, Unavailable.
        """
        if self._limits.idle_s is None:
            await self._until_stopped(self._start_all())

    async def stop(self) -> None:
        """Ends the processes; calls that wait or run fail with Unavailable."""
        self._stopped = True
        self._stay_awake()
        self._queue.fail_all(_stopping)
        await self._calls.cancel()
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def call(self, prepare: Callable[[], Awaitable[PreparedCall]], *, need: CallNeed | None = None) -> bytes:
        """Return what a process answers to that which `prepare` makes when its turn has come.

        A caller that is cancelled leaves a call that was begun to run to its end; a process of its own ends with it.
        Raises ProcessLost, QueueFull with the time after which to ask again, Unavailable, InternalError, and what
        `prepare` does.
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
        """What `work` returns. shielded: it outlives its caller. Raises Unavailable where the pool stops first."""
        if self._stopped:  # since the caller was last awake
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
        """Calls that come meanwhile wait: a process has one caller at a time, and its first answer is not theirs."""
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
        """The error of a call for which there is no room, or not in time."""
        return QueueFull(
            f"too many {self._limits.waiting}; ask again",
            metadata={"limit": self._limits.limit},
            retry_after_s=random.uniform(1.0, _SPREAD) * self._due_s(),
        )

    def _due_s(self) -> float:
        """Seconds until about a tenth of what waits will have been served, by what the last calls took."""
        call_s = sum(self._took_s) / len(self._took_s) if self._took_s else self._spec.deadline_s
        calls = max(1.0, _RETRY_SHARE * len(self._queue))
        return min(max(calls * call_s / len(self._processes), _MIN_RETRY_S), self._spec.deadline_s)

    def _stay_awake(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _rest(self) -> None:
        """Processes end after a while, unless there is another call."""
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
