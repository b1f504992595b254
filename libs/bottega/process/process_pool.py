"""A pool of child processes behind limits, and the bounded queue before them. Each process serves one call at a time.

Calls are served first come, first served. One of several processes never serves large calls, and large calls never fill
the queue, so that small ones always get on, whatever is sent beside them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bottega.background_tasks import BackgroundTasks
from bottega.errors import QueueFull, Unavailable
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
    call, after which processes end; None is never.
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
        self._queue = _ProcessQueue(self._processes, limits.max_waiting)
        self._took_s: deque[float] = deque(maxlen=_PACE_CALLS)
        self._calls = BackgroundTasks(f"calls of the {spec.name}")
        self._idle: asyncio.TimerHandle | None = None
        self._stopped = False

    @property
    def pids(self) -> list[int]:
        """Ids of the processes that run."""
        return [process.pid for process in self._processes if process.pid is not None]

    async def start(self) -> None:
        """Returns when all processes are ready but those that serve a call already, which starts its own.

        Raises InternalError when one does not start, Unavailable.
        """
        await self._until_stopped(self._start_all())

    async def stop(self) -> None:
        """Ends the processes; calls that wait or run fail with Unavailable."""
        self._stopped = True
        self._stay_awake()
        self._queue.fail_all(_stopping)
        await self._calls.cancel()
        await asyncio.gather(*(process.stop() for process in self._processes))

    async def call(self, prepare: Callable[[], Awaitable[PreparedCall]], *, large: bool = False) -> bytes:
        """What a process answers to that which `prepare` makes when its turn has come.

        large: whether it may take a process for long. A caller that is cancelled leaves a call that was begun to run to
        its end; a process of its own ends with it. Raises ProcessLost, QueueFull with the time after which to ask
        again, Unavailable, InternalError, and what `prepare` does.
        """
        if self._stopped:
            raise _stopping()
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                process = await self._queue.acquire(large=large)
        except (TimeoutError, asyncio.QueueFull):
            raise self._full() from None
        return await self._until_stopped(self._serve(process, prepare), shielded=not self._limits.new_process)

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

    async def _serve(self, process: LimitedProcess, prepare: Callable[[], Awaitable[PreparedCall]]) -> bytes:
        self._stay_awake()
        began_s = time.monotonic()
        try:
            return await self._exchange(process, await prepare())
        finally:
            try:
                if self._limits.new_process:
                    await process.stop()
            finally:
                self._took_s.append(time.monotonic() - began_s)
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


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiter:
    large: bool
    process: asyncio.Future[LimitedProcess]


class _ProcessQueue:
    """Gives processes to calls, first come, first served; the first of several goes to small calls alone."""

    def __init__(self, processes: Sequence[LimitedProcess], max_waiting: int) -> None:
        self._for_small = processes[0] if len(processes) > 1 else None
        self._free = list(processes)
        self._waiting: deque[_Waiter] = deque()
        self._max_waiting = max_waiting

    def __len__(self) -> int:
        return len(self._waiting)

    async def acquire(self, *, large: bool) -> LimitedProcess:
        """Release it. Raises asyncio.QueueFull, and what `fail_all` says."""
        for process in self._free:
            if self._may_serve(process, large):
                self._free.remove(process)
                return process
        if not self._has_room(large):
            raise asyncio.QueueFull
        waiter = _Waiter(large=large, process=asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            return await waiter.process
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.process.cancelled() and waiter.process.exception() is None:
                self.release(waiter.process.result())  # it came when its caller had gone
            raise

    def release(self, process: LimitedProcess) -> None:
        """It goes to the first that waits for it."""
        for waiter in self._waiting:
            if self._may_serve(process, waiter.large) and not waiter.process.done():
                self._waiting.remove(waiter)
                waiter.process.set_result(process)
                return
        # Small calls take the process that no large one may have before they take another.
        self._free.insert(0 if process is self._for_small else len(self._free), process)

    def acquire_free(self) -> list[LimitedProcess]:
        """Those that serve no call. Release them."""
        free, self._free = self._free, []
        return free

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """All that wait fail."""
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.process.done():
                waiter.process.set_exception(error())

    def _may_serve(self, process: LimitedProcess, large: bool) -> bool:
        return not large or process is not self._for_small

    def _has_room(self, large: bool) -> bool:
        if large and sum(waiter.large for waiter in self._waiting) >= max(1, self._max_waiting // 2):
            return False
        return len(self._waiting) < self._max_waiting


def _stopping() -> Unavailable:
    return Unavailable("the service is stopping")
