"""What callers see of a job: messages of its state and events, and watches, which stream the events to one caller.

A watch has no queue of events. It compares the job's state with the last state that it sent and yields the changes, so
a slow caller uses no memory and does not delay other callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import QueuePosition
from bottega.gateway.webhooks.events import without_query
from bottega.rpc.status import to_job_error
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
            async with asyncio.timeout(_PROGRESS_INTERVAL_S):
                await self._job.ended.wait()
        except TimeoutError:
            return


def job_to_wire(job: Job) -> image_pb2.Job:
    """Convert the current state of a job to its message, without the bytes of its images."""
    return image_pb2.Job(
        job_id=job.job_id,
        request_id=job.request.request_id,
        state=job.state,
        spec=job.bare,
        create_time=_timestamp(job.created_wall),
        start_time=_timestamp(job.started_wall),
        end_time=_timestamp(job.ended_wall),
        steps_done=job.steps.done,
        steps_total=job.steps.total,
        images=[image_to_wire(job, index) for index in range(len(job.images))],
        provenance=job.provenance,
        error=to_job_error(job.error) if job.error else None,
        priority=job.request.priority,
        webhook=_shown(image_pb2.Webhook.FromString(job.request.webhook)) if job.request.webhook else None,
    )


def _shown(webhook: image_pb2.Webhook) -> image_pb2.Webhook:
    return image_pb2.Webhook(url=without_query(webhook.url), events=webhook.events)


def image_to_wire(job: Job, index: int, data: bytes = b"") -> image_pb2.Image:
    """Convert an image of a job. `data` has its bytes; empty to send none."""
    picture = job.images[index]
    width, height = job.request.result_size if any(job.request.result_size) else (job.bare.width, job.bare.height)
    return image_pb2.Image(
        index=index,
        seed=job.bare.seed + index,
        format=job.bare.format,
        width=width,
        height=height,
        size_bytes=picture.size_bytes,
        digest=picture.digest,
        data=data,
    )


def event_to_wire(job: Job, event: WatchEvent, data: Sequence[bytes] = ()) -> image_pb2.JobEvent:
    """Convert an event of a job to its message. `data` has the bytes of its images; empty to send none."""
    if isinstance(event, QueuePosition):
        return image_pb2.JobEvent(
            job_id=job.job_id, queued=image_pb2.Queued(place=event.place, estimate_s=event.estimate_s)
        )
    if isinstance(event, RunningEvent):
        previews = [image_pb2.Preview(index=index, jpeg=jpeg) for index, jpeg in event.previews.items()]
        progress = image_pb2.Progress(steps_done=event.steps_done, steps_total=event.steps_total, previews=previews)
        return image_pb2.JobEvent(job_id=job.job_id, progress=progress)
    if job.error is not None:
        return image_pb2.JobEvent(job_id=job.job_id, failed=to_job_error(job.error))
    return image_pb2.JobEvent(job_id=job.job_id, completed=_completed(job, data))


def _completed(job: Job, data: Sequence[bytes]) -> image_pb2.Completed:
    data = data or [b""] * len(job.images)
    images = [image_to_wire(job, index, data[index]) for index in range(len(job.images))]
    return image_pb2.Completed(images=images, provenance=job.provenance)


def _timestamp(unix_s: float | None) -> Timestamp | None:
    if unix_s is None:
        return None
    timestamp = Timestamp()
    timestamp.FromNanoseconds(int(unix_s * 1e9))
    return timestamp
