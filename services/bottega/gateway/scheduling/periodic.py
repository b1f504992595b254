"""What is checked by the clock: leases of the fleet ten times a second, the queue every second.

Ends the leases of silent members, and fails jobs that no worker or add-on can serve.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Iterable, Sequence

from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock
from bottega.errors import BottegaError, NoWorker
from bottega.gateway.addons.addon import PREFETCHED_JOBS, AddOn
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.controller import JobController

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
    """`start` them after the controller, and `stop` them before it.

    worker_grace_s: how long the jobs of an earlier life wait for a worker of their model to join; how long that
    takes to start, this life of the gateway has not seen yet.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        controller: JobController,
        addons: Sequence[AddOn],
        worker_grace_s: float,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._controller = controller
        self._queue = controller.queue
        self._addons = addons
        self._worker_grace_s = worker_grace_s
        self._grace_until = 0.0
        self._clock = clock
        self._ticking = BackgroundTasks("checks of the fleet and the queue")
        self._publishing = BackgroundTasks("publishing of estimates")
        self._faults: deque[float] = deque(maxlen=_MOST_FAULTS)

    @property
    def healthy(self) -> bool:
        """Whether fleet and queue are checked: one fault may pass, several in a row are ours and stay."""
        faults = self._faults
        return len(faults) < _MOST_FAULTS or self._clock.monotonic() - faults[0] > _FAULTS_S

    def start_grace(self) -> None:
        """The jobs of an earlier life are queued now."""
        self._grace_until = self._clock.monotonic() + self._worker_grace_s

    def start(self) -> None:
        """Checks from now on."""
        self._ticking.start(self._tick())

    async def stop(self) -> None:
        """Checks no more. Harmless where it was not started."""
        await self._ticking.cancel()
        await self._publishing.cancel()

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
                self._controller.scheduler.schedule(model)
                self._fail_all(self._controller.estimates.unmeetable(model))
                self._check_addons(model, in_grace=in_grace)
            else:
                retry_after_s = self._queue.retry_after_s()
                error = NoWorker(f"no worker came back for model {model}", retry_after_s=retry_after_s)
                self._fail_all((job, error) for job in self._queue.line(model))
        if not self._publishing:
            self._publishing.start(self._publish_estimates())

    def _check_addons(self, model: str, *, in_grace: bool) -> None:
        for addon in self._addons:
            addon.prefetch(list(itertools.islice(self._queue.line(model), PREFETCHED_JOBS)))
            if not in_grace:
                waiting = self._queue.line(model)
                self._fail_all((job, error) for job in waiting if (error := addon.unavailable(job)) is not None)

    def _fail_all(self, failures: Iterable[tuple[Job, BottegaError]]) -> None:
        for job, error in list(failures):  # which are read from the queue, and leave it
            self._controller.fail(job, error)

    async def _publish_estimates(self) -> None:
        """Beside the ticks: a long queue takes a while, in which this process is not late to listen."""
        try:
            await self._controller.estimates.publish_all()
        except Exception:  # noqa: BLE001 - the boundary of the task
            _log.exception("the estimates of the queue could not be published")
            self._faults.append(self._clock.monotonic())
