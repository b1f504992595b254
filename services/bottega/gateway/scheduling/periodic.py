"""What is checked by the clock: leases of the fleet ten times a second, the queue every second.

Ends the leases of silent members, and fails jobs that no worker or add-on can serve.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence

from bottega.clocks import Clock
from bottega.errors import BottegaError, NoWorker
from bottega.gateway.addons.addon import PREFETCHED_JOBS, AddOn
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.estimates import QueueEstimates
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.scheduler import Scheduler

# A tick later than this means that this process, not its members, was silent.
_LATE_S = 0.5
_TICK_S = 0.1
_TICKS_PER_SECOND = 10
# Checks that failed within so many seconds, after which the gateway says that it does not serve. The queue has one
# a second.
_MOST_FAULTS = 3
_FAULTS_S = 10.0

_log = logging.getLogger(__name__)


class PeriodicChecks:
    """`start` them with the gateway, and `stop` them first.

    fail: ends a job. worker_grace_s: how long the jobs of an earlier life wait for a worker of their model to join.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        queue: JobQueue,
        scheduler: Scheduler,
        estimates: QueueEstimates,
        addons: Sequence[AddOn],
        fail: Callable[[Job, BottegaError], None],
        worker_grace_s: float,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._scheduler = scheduler
        self._estimates = estimates
        self._addons = addons
        self._fail = fail
        self._worker_grace_s = worker_grace_s
        self._grace_until = 0.0
        self._clock = clock
        self._ticking: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._faults: deque[float] = deque(maxlen=_MOST_FAULTS)

    @property
    def healthy(self) -> bool:
        """Whether fleet and queue are checked: one fault may pass, several in a row are ours and stay."""
        faults = self._faults
        return len(faults) < _MOST_FAULTS or self._clock.monotonic() - faults[0] > _FAULTS_S

    def begin_grace(self) -> None:
        """The jobs of an earlier life are queued now."""
        self._grace_until = self._clock.monotonic() + self._worker_grace_s

    def start(self) -> None:
        """Begins to check."""
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Checks no more. Harmless where it was not started."""
        for task in filter(None, (self._ticking, self._publishing)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _tick(self) -> None:
        checked_at = self._clock.monotonic()
        for tick in itertools.count(1):
            await asyncio.sleep(_TICK_S)
            # Since the check before, and not only while it slept: this process may be stopped anywhere.
            before, checked_at = checked_at, self._clock.monotonic()
            try:
                self._check(tick, late_s=max(0.0, checked_at - before - _TICK_S))
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no lease ends, and no job starts
                _log.exception("the fleet and the queue could not be checked")
                self._faults.append(self._clock.monotonic())
                await asyncio.sleep(_TICK_S * _TICKS_PER_SECOND)  # what fails every time is not logged every time
                checked_at = self._clock.monotonic()

    def _check(self, tick: int, *, late_s: float) -> None:
        if late_s > _LATE_S:
            _log.warning("the event loop was late; leases are renewed", extra={"late_s": round(late_s, 3)})
            self._fleet.renew_leases()
            self._grace_until += late_s
            return  # what members sent meanwhile is read before any is given up, or a job for want of it
        self._fleet.expire()
        if tick % _TICKS_PER_SECOND == 0:
            self._check_queue()

    def _check_queue(self) -> None:
        in_grace = self._clock.monotonic() < self._grace_until
        for model in self._queue.models():
            if in_grace or self._fleet.expected(model):
                self._scheduler.schedule(model)
                for job, error in list(self._estimates.unmeetable(model)):
                    self._fail(job, error)
                self._check_addons(model, in_grace=in_grace)
                continue
            for job in list(self._queue.line(model)):
                retry_after_s = self._queue.retry_after_s()
                self._fail(job, NoWorker("no worker came back for the model", retry_after_s=retry_after_s))
        if self._publishing is None or self._publishing.done():
            self._publishing = asyncio.create_task(self._publish_estimates())

    def _check_addons(self, model: str, *, in_grace: bool) -> None:
        line = self._queue.line(model)
        for addon in self._addons:
            addon.prefetch(list(itertools.islice(line, PREFETCHED_JOBS)))
            for job in () if in_grace else list(line):
                error = addon.unavailable(job)
                if error is not None:
                    self._fail(job, error)

    async def _publish_estimates(self) -> None:
        """Beside the ticks: a long queue takes a while, in which this process is not late to listen."""
        try:
            await self._estimates.publish_all()
        except Exception:  # noqa: BLE001 - the boundary of the task
            _log.exception("the estimates of the queue could not be published")
            self._faults.append(self._clock.monotonic())
