"""The periodic checks of a gateway: leases of its members, jobs that nothing can serve any more, and estimates.

Periodic checks end the leases of silent members, and fail jobs that no worker or add-on can serve. While all members
report, no check is due before a lease could end, so an idle gateway sleeps. When the lease of a member is about to end,
leases are checked every tenth of a second. If a check is late, it renews all leases, because the gateway itself was
stalled, not the services.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence

from bottega.addons.interface.gateway_addon import PREFETCHED_JOBS, AddOn, PrefetchReason
from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock, seconds_until_tick
from bottega.errors import BottegaError, NoWorker
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.controller import JobController

# If a check is late by more seconds than this, this process was stalled, not its members.
_LATE_S = 0.5
# Seconds between two checks while the lease of a member is about to end, or after a check has failed.
_TICK_S = 0.1
# Rest of a lease from which on ticks are frequent: after a stall of this process, reports that came meanwhile are
# read before a member is removed.
_ABOUT_TO_END_S = 0.5
_QUEUE_S = 1.0
# Part of that after which the queue is due, because timers fire a moment earlier or later.
_ABOUT = 0.9
# Number of checks that fail within so many seconds before the gateway reports NOT_SERVING.
_MAX_FAULTS = 3
_FAULTS_S = 10.0

_log = logging.getLogger(__name__)


class PeriodicChecks:
    """Runs the checks of a gateway's fleet and queue. `start` them after the controller, and `stop` them before it.

    Args:
        worker_grace_s: Seconds for which jobs from before a restart wait for a worker of their model to join. The
            restarted gateway does not know yet how long such a worker takes to start.
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
        self._queue_due_at = -math.inf
        """Time of the next check of the queue, on the clock of the event loop."""
        self._checking = BackgroundTasks("checks of the fleet and the queue")
        self._publishing = BackgroundTasks("publishing of estimates")
        self._faults: deque[float] = deque(maxlen=_MAX_FAULTS)

    @property
    def healthy(self) -> bool:
        """Whether the checks run. A single failure does not count, several within seconds do."""
        faults = self._faults
        return len(faults) < _MAX_FAULTS or self._clock.monotonic() - faults[0] > _FAULTS_S

    def start_grace(self) -> None:
        """Start the time during which jobs from before a restart wait for a worker, and scalers stop nothing."""
        self._grace_until = self._clock.monotonic() + self._worker_grace_s
        self._controller.demand.begin(grace_s=self._worker_grace_s)

    def start(self) -> None:
        """Start the background checks."""
        self._checking.start(self._keep_checking())

    async def stop(self) -> None:
        """Stop the background checks. Does nothing if they were not started."""
        await self._checking.cancel()
        await self._publishing.cancel()

    async def _keep_checking(self) -> None:
        checked_at = self._clock.monotonic()
        while True:
            pause_s = self._pause_s()
            await asyncio.sleep(pause_s)
            # Since the check before, and not only while it slept: this process may be stopped anywhere.
            before, checked_at = checked_at, self._clock.monotonic()
            try:
                self._check(late_s=max(0.0, checked_at - before - pause_s))
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no lease ends, and no job starts
                _log.exception("the check of the fleet and the queue failed; it is tried again")
                self._faults.append(self._clock.monotonic())
                await asyncio.sleep(_QUEUE_S)  # what fails every time is not logged every time
                checked_at = self._clock.monotonic()

    def _pause_s(self) -> float:
        """Return the seconds until a lease is about to end or the queue has to be checked."""
        lease_s = self._fleet.lease_s
        quiet_s = self._fleet.shortest_lease_s() - min(_ABOUT_TO_END_S, lease_s / 2)
        return min(max(quiet_s, _TICK_S), seconds_until_tick(_QUEUE_S))

    def _check(self, *, late_s: float) -> None:
        if late_s > _LATE_S:
            _log.warning("the event loop was stalled; all leases are renewed", extra={"late_s": round(late_s, 3)})
            self._fleet.renew_leases()
            self._grace_until += late_s
            return  # read the pending reports before any member or job is given up
        self._fleet.expire()
        now = asyncio.get_running_loop().time()
        if now >= self._queue_due_at:
            self._queue_due_at = now + _ABOUT * _QUEUE_S
            if self._controller.has_jobs:
                self._fleet.wake_up()
            else:
                self._fleet.rest()
            self._check_queue()
            self._controller.demand.update()

    def _check_queue(self) -> None:
        in_grace = self._clock.monotonic() < self._grace_until
        for model in self._queue.models():
            if in_grace or self._fleet.expected(model):
                self._controller.scheduler.schedule(model)
                self._fail_all(self._controller.estimates.unmeetable(model))
                self._check_addons(model, in_grace=in_grace)
            else:
                retry_after_s = self._queue.retry_after_s()
                error = NoWorker(
                    f"no worker of model {model} joined within the grace period", retry_after_s=retry_after_s
                )
                self._fail_all((job, error) for job in self._queue.line(model))
        if not self._publishing:
            self._publishing.start(self._publish_estimates())

    def _check_addons(self, model: str, *, in_grace: bool) -> None:
        for addon in self._addons:
            addon.prefetch(list(itertools.islice(self._queue.line(model), PREFETCHED_JOBS)), PrefetchReason.NEXT)
            if not in_grace:
                waiting = self._queue.line(model)
                self._fail_all((job, error) for job in waiting if (error := addon.unavailable(job)) is not None)

    def _fail_all(self, failures: Iterable[tuple[Job, BottegaError]]) -> None:
        for job, error in list(failures):  # a copy, because failing a job removes it from the queue
            self._controller.fail(job, error)

    async def _publish_estimates(self) -> None:
        """Compute and publish estimates in a task of their own, because a long queue takes a while."""
        try:
            await self._controller.estimates.publish_all()
        except Exception:  # noqa: BLE001 - the boundary of the task
            _log.exception("computing the estimates of the queue failed; it is tried again")
            self._faults.append(self._clock.monotonic())
