"""A handle on a submitted job, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from bottega.client.transport.calls import CallTimeout, fetch_image
from bottega.client.transport.connection import GatewayConnection
from bottega.client.transport.watching import wait_until_completed, watch_job
from bottega.client.types.jobs import Event, JobStatus, JobTrace, Progress, status_from, trace_from
from bottega.client.types.messages import build_message
from bottega.client.types.picture import Picture, picture_from
from bottega.client.types.provenance import Provenance
from bottega.errors import DeadlinePassed
from bottega.v1 import image_pb2


class AsyncJob:
    """A handle on a job of the gateway. Its ID suffices to find it again: `client.job(id)`.

    The job goes on without the handle. Every method raises classes of bottega.errors.
    """

    def __init__(self, job_id: str, connection: GatewayConnection) -> None:
        self.id = job_id
        self._connection = connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def status(self) -> JobStatus:
        """Return the job's current state."""
        request = build_message(image_pb2.GetJobRequest(), job_id=self.id)
        return status_from((await self._connection.call(self._connection.images.GetJob, request)).job)

    async def stream(
        self, *, preview: bool = False, timeout_s: float | None = None, fetch: bool = True
    ) -> AsyncGenerator[Event, None]:
        """Yield the job's events from now on, as client.stream() does; the last one is Completed.

        Args:
            preview: Whether Progress carries small JPEGs of the unfinished pictures.
            timeout_s: Seconds after which to stop following the job; None for the client's own.
            fetch: Whether Completed has all pictures; otherwise the data of large ones is empty.

        Raises:
            BottegaError: The job failed or was cancelled.
        """
        images, terms = self._connection.images, self._connection.terms(timeout_s)
        request = build_message(image_pb2.WatchJobRequest(), job_id=self.id, preview=preview)
        last = LastProgress(job_id=self.id)
        try:
            async with aclosing(
                watch_job(lambda left_s: images.WatchJob(request, timeout=left_s), images, terms, fetch=fetch)
            ) as events:
                async for event in events:
                    last.update(event)
                    yield event
        except CallTimeout as error:
            raise timeout_error(error, last, goes_on=True) from error

    async def result(self, *, timeout_s: float | None = None) -> tuple[Picture, ...]:
        """Wait for the job's pictures, and return them in order. Raise the job's error if it failed or was cancelled.

        Args:
            timeout_s: As in stream(). When it passes, DeadlinePassed is raised, and the job goes on.
        """
        return (await wait_until_completed(self.stream(timeout_s=timeout_s))).images

    async def image(self, index: int = 0, *, timeout_s: float | None = None) -> Picture:
        """Return one of the job's pictures. Raise JobNotFinished if the job has not completed."""
        terms = self._connection.terms(timeout_s)
        request = build_message(image_pb2.GetImageRequest(), job_id=self.id, index=index)
        image, data = await fetch_image(self._connection.images.GetImage, request, terms)
        provenance = (await self.status()).provenance or Provenance()
        return picture_from(image, data, job_id=self.id, provenance=provenance)

    async def image_url(self, index: int = 0) -> str:
        """Return a URL by which anybody can read a picture for a while; "" where the operator allows none."""
        request = build_message(image_pb2.GetImageRequest(), job_id=self.id, index=index, as_url=True)
        image, _ = await fetch_image(self._connection.images.GetImage, request, self._connection.terms(None))
        return image.url

    async def trace(self) -> JobTrace:
        """Return the job's timeline in all services. Raise TraceNotFound while it runs, or if the trace was evicted."""
        request = build_message(image_pb2.GetJobTraceRequest(), job_id=self.id)
        answer = await self._connection.call(self._connection.images.GetJobTrace, request)
        return trace_from(self.id, answer.trace)

    async def delete(self) -> None:
        """Delete the job with its pictures, its trace and its request_id. Raise JobNotFinished if it has not ended."""
        request = build_message(image_pb2.DeleteJobRequest(), job_id=self.id)
        await self._connection.call(self._connection.images.DeleteJob, request)

    async def cancel(self) -> JobStatus:
        """Cancel the job unless it has ended, and return its state."""
        request = build_message(image_pb2.CancelJobRequest(), job_id=self.id)
        answer = await self._connection.call(self._connection.images.CancelJob, request)
        return status_from(answer.job)


_GOES_ON = "The job goes on: client.job({job_id!r}).stream() follows it, and .result() has its pictures."
_ENDS = "Allow more time (timeout_s), or submit() a job, which outlives the call, and fetch its pictures later."


@dataclass(slots=True, kw_only=True)
class LastProgress:
    """The last progress of a job that its caller has seen. `job_id` is empty before the first event."""

    job_id: str = ""
    steps_done: int = 0
    steps_total: int = 0

    def update(self, event: Event) -> None:
        """Update the job's id and its step counts from an event."""
        self.job_id = getattr(event, "job_id", self.job_id)
        if isinstance(event, Progress):
            self.steps_done, self.steps_total = event.steps_done, event.steps_total


def timeout_error(error: DeadlinePassed, last: LastProgress, *, goes_on: bool) -> DeadlinePassed:
    """Return a time-out error that describes the job's progress, with advice in its notes.

    Args:
        error: The error of the call.
        last: The progress that the caller has seen.
        goes_on: Whether the job continues without its caller.
    """
    if not last.job_id:
        return error
    steps = f"{last.steps_done} of {last.steps_total} steps were done" if last.steps_total else "no step was done"
    state = "goes on" if goes_on else "is cancelled"
    error = CallTimeout(
        f"{error.message}: {steps}, and job {last.job_id} {state}",
        metadata={**error.metadata, "job_id": last.job_id, "steps_done": str(last.steps_done)},
    )
    error.add_note(_GOES_ON.format(job_id=last.job_id) if goes_on else _ENDS)
    return error
