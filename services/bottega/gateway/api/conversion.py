"""Jobs and events of the gateway as messages of the API."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.timestamp_pb2 import Timestamp

from bottega.gateway.api.watching import RunningEvent, WatchEvent
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import QueuePosition
from bottega.rpc.status import to_job_error
from bottega.v1 import image_pb2

# Larger results do not come with events; callers fetch them by GetImage (contract: Image.data).
MAX_INLINE_BYTES = 2 << 20
# Upper bound on the event of a completed job without its images: most of it is the provenance.
_COMPLETED_BYTES = 64 << 10


def job_to_wire(job: Job) -> image_pb2.Job:
    """Return the message of a job as it stands, without the bytes of its images."""
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
    )


def image_to_wire(job: Job, index: int, data: bytes = b"") -> image_pb2.Image:
    """Return the message of a finished image."""
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
    """Return the message of an event of a job. data: The bytes of its images if they are sent along."""
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


def travels_inline(job: Job) -> bool:
    """Return whether the images of a completed job may be sent along with the event."""
    return _size_bytes(job) < MAX_INLINE_BYTES


def inline_bytes(job: Job) -> int:
    """Return the size of the event of a completed job with its images."""
    return _size_bytes(job) + _COMPLETED_BYTES


def _size_bytes(job: Job) -> int:
    return sum(picture.size_bytes for picture in job.images)


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
