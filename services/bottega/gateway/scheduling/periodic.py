"""Looks after the fleet several times a second, and after those who wait every second: what no news would tell.

Silence ends leases, and waiting in vain ends jobs. Knows no wire.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable

from bottega.errors import BottegaError, NoWorker
from bottega.gateway.addons.controlnets.placement import ControlNetPlacement
from bottega.gateway.addons.controlnets.prefetch import AHEAD, ControlNetPrefetcher
from bottega.gateway.clock import Clock
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.estimates import QueueEstimates
from bottega.gateway.scheduling.queue import JobQueue
from bottega.gateway.scheduling.scheduler import Scheduler

# A tick later than this says that this process, not its members, was silent.
_LATE_S = 0.5
_TICK_S = 0.1
_TICKS_PER_SECOND = 10
# Checks that failed within so many seconds, after which the gateway says that it does not serve. The queue has one
# a second.
_MOST_FAULTS = 3
_FAULTS_S = 10.0

_log = logging.getLogger(__name__)


class PeriodicChecks:
    """`start` it with the gateway, and `stop` it first.

    fail: ends a job. patience_s: how long the jobs of an earlier life wait for a worker of their model to join at all.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        queue: JobQueue,
        matching: Scheduler,
        standings: QueueEstimates,
        placement: ControlNetPlacement,
        prefetcher: ControlNetPrefetcher,
        fail: Callable[[Job, BottegaError], None],
        patience_s: float,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._queue = queue
        self._matching = matching
        self._standings = standings
        self._placement = placement
        self._prefetcher = prefetcher
        self._fail = fail
        self._patience_s = patience_s
        self._patient_until = 0.0
        self._clock = clock
        self._ticking: asyncio.Task[None] | None = None
        self._telling: asyncio.Task[None] | None = None
        self._faults: deque[float] = deque(maxlen=_MOST_FAULTS)

    @property
    def sound(self) -> bool:
        """Whether fleet and queue are looked after: one fault may pass, several in a row are ours and stay."""
        faults = self._faults
        return len(faults) < _MOST_FAULTS or self._clock.monotonic() - faults[0] > _FAULTS_S

    def be_patient(self) -> None:
        """The jobs of an earlier life line up now."""
        self._patient_until = self._clock.monotonic() + self._patience_s

    def start(self) -> None:
        """Begins."""
        self._ticking = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """Ends. Harmless where it was not begun."""
        for task in filter(None, (self._ticking, self._telling)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _tick(self) -> None:
        looked_at = self._clock.monotonic()
        for tick in itertools.count(1):
            await asyncio.sleep(_TICK_S)
            # Since the look before, and not only while it slept: this process may be stopped anywhere.
            before, looked_at = looked_at, self._clock.monotonic()
            try:
                self._look_after(tick, late_s=max(0.0, looked_at - before - _TICK_S))
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no lease ends, and nobody gets a turn
                _log.exception("the fleet and the queue could not be looked after")
                self._faults.append(self._clock.monotonic())
                await asyncio.sleep(_TICK_S * _TICKS_PER_SECOND)  # what fails every time is not logged every time
                looked_at = self._clock.monotonic()

    def _look_after(self, tick: int, *, late_s: float) -> None:
        if late_s > _LATE_S:
            _log.warning("the event loop was late; leases are renewed", extra={"late_s": round(late_s, 3)})
            self._fleet.forgive()
            self._patient_until += late_s
            return  # whoever came meanwhile is heard before anybody is given up for want of them
        self._fleet.expire()
        if tick % _TICKS_PER_SECOND == 0:
            self._look_after_queue()

    def _look_after_queue(self) -> None:
        patient = self._clock.monotonic() < self._patient_until
        for model in self._queue.models():
            if patient or self._fleet.expected(model):
                self._matching.at_once(model)
                for job, error in list(self._standings.unmeetable(model)):
                    self._fail(job, error)
                self._look_after_controlnets(model, patient=patient)
                continue
            for job in list(self._queue.line(model)):
                retry_after_s = self._queue.retry_after_s()
                self._fail(job, NoWorker("no worker came back for the model", retry_after_s=retry_after_s))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_all())

    async def _tell_all(self) -> None:
        """Beside the ticks: a long queue takes a while, in which this process is not late to listen."""
        try:
            await self._standings.tell_all()
        except Exception:  # noqa: BLE001 - the boundary of the task
            _log.exception("those who wait could not be told where they stand")
            self._faults.append(self._clock.monotonic())

    def _look_after_controlnets(self, model: str, *, patient: bool) -> None:
        line = self._queue.line(model)
        self._prefetcher.ahead(itertools.islice(line, AHEAD))
        if patient:
            return
        for job in [job for job in line if job.controlnets]:
            gone = self._placement.missing(job)
            if gone is not None:
                self._fail(job, gone)
