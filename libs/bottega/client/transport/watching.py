"""Typed events of a job, with complete pictures, and the cancelling of jobs whose caller leaves."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

from bottega.background_tasks import BackgroundTasks
from bottega.client.transport.calls import (
    MAX_IMAGE_BYTES,
    CallTerms,
    CarrierT_co,
    EventStream,
    check_digest,
    fetch_image,
    follow_events,
)
from bottega.client.types.jobs import Completed, Event, Interrupted, Preview, Progress, Queued
from bottega.client.types.picture import picture_from
from bottega.client.types.provenance import provenance_from
from bottega.errors import BottegaError, DeadlinePassed, InternalError, NoWorker, Unavailable, WorkerLost
from bottega.rpc.status import from_job_error
from bottega.v1.image_pb2 import CancelJobRequest, GenerateRequest, GetImageRequest, Image, JobEvent

if TYPE_CHECKING:
    from bottega.v1.image_pb2_grpc import ImageServiceAsyncStub

# Far above the limit of a request, and four times what a gateway keeps of a job by default.
_MAX_IMAGES = 1024
_MAX_RESULT_BYTES = 512 << 20

# A running gateway answers in milliseconds; a process that exits should not wait for a missing one.
_CANCEL_S = 3.0

_log = logging.getLogger(__name__)


async def watch_job(
    attach: Callable[[float], EventStream[CarrierT_co]],
    images: ImageServiceAsyncStub,
    terms: CallTerms,
    *,
    fetch: bool = True,
) -> AsyncGenerator[Event, None]:
    """Yield the events of a job, the last of which is Completed. Raise the job's error if it failed.

    Args:
        attach: Opens the job's stream.
        images: The gateway's stub.
        terms: The terms of the call.
        fetch: Whether to fetch pictures that the last event does not contain. Otherwise their data is empty.
    """
    async with aclosing(follow_events(attach, terms)) as items:
        async for item in items:
            if isinstance(item, Interrupted):
                yield item
                continue
            match item.WhichOneof("event"):
                case "queued":
                    estimate_s = item.queued.estimate_s if item.queued.HasField("estimate_s") else None
                    yield Queued(job_id=item.job_id, place=item.queued.place, estimate_s=estimate_s)
                case "progress":
                    yield _progress(item)
                case "completed":
                    yield await _completed(item, images, terms, fetch=fetch)
                case "failed":
                    raise from_job_error(item.failed)
                case unknown:
                    raise InternalError(f"the gateway sent an event that this client does not know: {unknown}")


async def wait_until_completed(events: AsyncGenerator[Event, None]) -> Completed:
    """Return the last of a job's events. Raise the job's error if it failed."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, Completed):
                return event
    raise InternalError("the stream of events ended before the job completed")


def _progress(event: JobEvent) -> Progress:
    progress = event.progress
    return Progress(
        job_id=event.job_id,
        steps_done=progress.steps_done,
        steps_total=progress.steps_total,
        previews=tuple(Preview(index=item.index, jpeg=item.jpeg) for item in progress.previews),
    )


async def _completed(event: JobEvent, images: ImageServiceAsyncStub, terms: CallTerms, *, fetch: bool) -> Completed:
    images_of_job = event.completed.images
    if not images_of_job:
        raise InternalError("the gateway reports a completed job without an image")
    if len(images_of_job) > _MAX_IMAGES or sum(image.size_bytes for image in images_of_job) > _MAX_RESULT_BYTES:
        raise InternalError(
            f"the gateway announces more than {_MAX_IMAGES} images of one job, or more than"
            f" {_MAX_RESULT_BYTES >> 20} MiB of them: fetch those that you want one by one"
        )
    provenance = provenance_from(event.completed.provenance)
    pictures = []
    for image in images_of_job:
        data = await _bytes_of(image, event.job_id, images, terms) if fetch or image.data else b""
        pictures.append(picture_from(image, data, job_id=event.job_id, provenance=provenance))
    return Completed(job_id=event.job_id, images=tuple(pictures), provenance=provenance)


async def _bytes_of(image: Image, job_id: str, images: ImageServiceAsyncStub, terms: CallTerms) -> bytes:
    if not image.data:
        request = GetImageRequest(job_id=job_id, index=image.index)
        max_bytes = min(image.size_bytes, MAX_IMAGE_BYTES)
        _, data = await fetch_image(images.GetImage, request, terms, max_bytes=max_bytes)
        return data
    check_digest(image, hashlib.sha256(image.data).hexdigest())
    return image.data


class CancelOnExit:
    """Cancels jobs in the background when their caller leaves."""

    def __init__(self, images: ImageServiceAsyncStub) -> None:
        self._images = images
        self._tasks = BackgroundTasks("cancelling of jobs whose caller left")
        self._over = False

    def cancel_soon(self, request: GenerateRequest, job_id: str) -> None:
        """Cancel a job in the background.

        Args:
            request: The request of the job. Its request_id identifies the job if `job_id` is empty.
            job_id: Empty if the caller left before the gateway had sent the ID.
        """
        if self._over:
            _log.warning("a request was not cancelled before its client was closed; it may still run")
            return
        self._tasks.start(self._cancel(request, job_id))

    async def finish(self) -> None:
        """Wait until all jobs are cancelled, each within its own deadline, and accept no more."""
        await self._tasks.join()
        self._over = True

    async def _cancel(self, request: GenerateRequest, job_id: str) -> None:
        try:
            found = job_id or await self._find(request)
            if not found:
                return
            await self._images.CancelJob(CancelJobRequest(job_id=found), timeout=_CANCEL_S)
        except grpc.RpcError as error:
            # Without an ID there may be no job: the gateway never answered.
            level = logging.WARNING if job_id else logging.DEBUG
            _log.log(level, "job %s was left unfinished and could not be cancelled: %s", job_id, error.code().name)

    async def _find(self, request: GenerateRequest) -> str:
        call = self._images.Generate(request, timeout=_CANCEL_S)
        try:
            async for response in call:
                return response.event.job_id
            return ""
        finally:
            call.cancel()


def job_has_ended(error: BottegaError) -> bool:
    """Return whether an error means that the job has ended, or was never accepted."""
    if isinstance(error, Unavailable):
        return isinstance(error, NoWorker | WorkerLost)
    return not isinstance(error, DeadlinePassed)
