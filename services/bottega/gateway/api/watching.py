"""Watches of jobs. A watch streams the events of one job to one caller, as fast as the caller reads.

A watch has no queue of events. It compares the job's state with the last state that it sent and yields the changes, so
a slow caller uses no memory and does not delay other callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import QueuePosition
from bottega.v1 import image_pb2

_PROGRESS_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEvent:
    """The progress of a running job."""

    steps_done: int
    steps_total: int
    previews: Mapping[int, bytes]
    """New previews of the images, as JPEG bytes, by image index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEvent:
    """The end of a job, with its outcome."""


WatchEvent = QueuePosition | RunningEvent | EndedEvent


class JobWatch:
    """Streams the events of one job to one caller.

    Args:
        job: The job.
        preview: Whether events have previews.
        announce: Whether the first event is the job's first position in the queue, even if it is running already.
    """

    def __init__(self, job: Job, *, preview: bool = False, announce: bool = False) -> None:
        self._job = job
        self._preview = preview
        self._announce = announce
        self._wake = asyncio.Event()
        self._last: QueuePosition | tuple[int, int] | None = None
        self._seen_version = 0

    async def events(self) -> AsyncGenerator[WatchEvent, None]:
        """Yield the current state, then each change, and EndedEvent last.

        Raises the error for callers if the gateway stops following the job.
        """
        self._job.listeners.add(self._wake.set)
        try:
            if self._announce and self._job.queue_position is not None:
                self._last = self._job.queue_position
                yield self._job.queue_position
            while self._job.live:
                if self._job.detached is not None:
                    raise self._job.detached.with_traceback(None)
                self._wake.clear()
                event = self._changes()
                if event is not None:
                    yield event
                if isinstance(event, RunningEvent):
                    await self._let_gather()
                await self._wake.wait()
            yield EndedEvent()
        finally:
            self._job.listeners.discard(self._wake.set)

    def _changes(self) -> WatchEvent | None:
        if self._job.state == image_pb2.JOB_STATE_QUEUED:
            position = self._job.queue_position
            if position is None or position == self._last:
                return None
            self._last = position
            return position
        steps = (self._job.steps.done, self._job.steps.total)
        previews = self._new_previews()
        if steps == self._last and not previews:
            return None
        self._last = steps
        return RunningEvent(steps_done=steps[0], steps_total=steps[1], previews=previews)

    def _new_previews(self) -> dict[int, bytes]:
        if not self._preview:
            return {}
        new = {i: preview for i, preview in self._job.previews.items() if preview.version > self._seen_version}
        self._seen_version = max((preview.version for preview in new.values()), default=self._seen_version)
        return {i: preview.jpeg for i, preview in sorted(new.items())}

    async def _let_gather(self) -> None:
        """Wait a moment, so that several changes become one event. Return early if the job ends."""
        try:
            await asyncio.wait_for(self._job.ended.wait(), _PROGRESS_INTERVAL_S)
        except TimeoutError:
            return
