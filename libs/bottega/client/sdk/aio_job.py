"""A job that was submitted, for asyncio: follow it, fetch its pictures, cancel it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from bottega.client.transport.calls import fetch_image
from bottega.client.transport.connection import GatewayConnection
from bottega.client.transport.retry import CallTimeout, LastProgress, timeout_error
from bottega.client.transport.watching import wait_until_completed, watch_job
from bottega.client.types.events import Event
from bottega.client.types.jobs import JobStatus, status_from
from bottega.client.types.messages import build_message
from bottega.client.types.picture import Picture, picture_from
from bottega.client.types.provenance import Provenance
from bottega.client.types.trace import JobTrace, trace_from
from bottega.v1 import image_pb2


class AsyncJob:
    """A job by its id, which is all that has to be kept to find it again: `client.job(id)`.

    It lives at the gateway; leaving it stops nothing. Every method raises classes of bottega.errors.
    """

    def __init__(self, job_id: str, connection: GatewayConnection) -> None:
        self.id = job_id
        self._connection = connection

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r})"

    async def status(self) -> JobStatus:
        """How it stands."""
        request = build_message(image_pb2.GetJobRequest(), job_id=self.id)
        return status_from((await self._connection.call(self._connection.images.GetJob, request)).job)

    async def stream(self, *, preview: bool = False, timeout_s: float | None = None) -> AsyncGenerator[Event, None]:
        """Yield its events from its current state on, as client.stream() does; the last one is Completed.

        Args:
            preview: Whether Progress carries small JPEGs of the unfinished pictures.
            timeout_s: Seconds after which it is not followed any more; None is the client's own.

        Raises:
            BottegaError: What ended the job otherwise.
        """
        images, terms = self._connection.images, self._connection.terms(timeout_s)
        request = build_message(image_pb2.WatchJobRequest(), job_id=self.id, preview=preview)
        last = LastProgress(job_id=self.id)
        try:
            async with aclosing(
                watch_job(lambda left_s: images.WatchJob(request, timeout=left_s), images, terms)
            ) as events:
                async for event in events:
                    last.update(event)
                    yield event
        except CallTimeout as error:
            raise timeout_error(error, last, goes_on=True) from error

    async def result(self, *, timeout_s: float | None = None) -> tuple[Picture, ...]:
        """Its pictures, in order, as soon as they are there. Raises what ended it otherwise.

        timeout_s: as in stream(); DeadlinePassed then, and the job goes on.
        """
        return (await wait_until_completed(self.stream(timeout_s=timeout_s))).images

    async def image(self, index: int = 0, *, timeout_s: float | None = None) -> Picture:
        """One of its finished pictures. Raises JobNotFinished while there are none."""
        terms = self._connection.terms(timeout_s)
        request = build_message(image_pb2.GetImageRequest(), job_id=self.id, index=index)
        image, data = await fetch_image(self._connection.images.GetImage, request, terms)
        provenance = (await self.status()).provenance or Provenance()
        return picture_from(image, data, job_id=self.id, provenance=provenance)

    async def trace(self) -> JobTrace:
        """What of it took how long, in all services. Raises TraceNotFound while it runs, and when that is forgotten."""
        request = build_message(image_pb2.GetJobTraceRequest(), job_id=self.id)
        answer = await self._connection.call(self._connection.images.GetJobTrace, request)
        return trace_from(self.id, answer.trace)

    async def delete(self) -> None:
        """Delete it with its pictures, its trace and its request_id. Raise JobNotFinished where it has not ended."""
        request = build_message(image_pb2.DeleteJobRequest(), job_id=self.id)
        await self._connection.call(self._connection.images.DeleteJob, request)

    async def cancel(self) -> JobStatus:
        """Cancels it, and says how it stands then; one that has ended stays as it is."""
        request = build_message(image_pb2.CancelJobRequest(), job_id=self.id)
        answer = await self._connection.call(self._connection.images.CancelJob, request)
        return status_from(answer.job)
