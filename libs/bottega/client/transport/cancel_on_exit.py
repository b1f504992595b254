"""Cancels jobs whose caller left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import grpc

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, DeadlinePassed, NoWorker, Unavailable, WorkerLost
from bottega.v1.image_pb2 import CancelJobRequest, GenerateRequest

if TYPE_CHECKING:
    from bottega.v1.image_pb2_grpc import ImageServiceAsyncStub

_log = logging.getLogger(__name__)

# A running gateway answers in milliseconds; a process that exits should not wait for a missing one.
_CANCEL_S = 3.0


class CancelOnExit:
    """The cancellations of jobs whose caller left."""

    def __init__(self, images: ImageServiceAsyncStub) -> None:
        self._images = images
        self._tasks = BackgroundTasks("cancelling of jobs whose caller left")
        self._over = False

    def cancel_soon(self, request: GenerateRequest, job_id: str) -> None:
        """Cancel a job in the background.

        Args:
            request: The request of the job. Its request_id finds the job if `job_id` is empty.
            job_id: Empty if the caller left before it was known.
        """
        if self._over:
            _log.warning("a request was left unfinished when its client was closed; it may still run")
            return
        self._tasks.start(self._cancel(request, job_id))

    async def finish(self) -> None:
        """Wait until all jobs are cancelled, each within its own deadline, and refuse further ones."""
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
    """Return whether an error means that the job has ended, or never began."""
    if isinstance(error, Unavailable):
        return isinstance(error, NoWorker | WorkerLost)
    return not isinstance(error, DeadlinePassed)
