"""The APIs of a gateway that shares its jobs with others: calls about live jobs are answered by the scheduler.

Every gateway accepts every call. One that is not the scheduler answers reads of ended jobs from the database and the
object store, and admits submitted jobs by itself (api/following.py). It passes other calls on to the scheduler, with
the caller's identity and deadline. While there is no scheduler, calls wait for the next one. A call whose scheduler
dies is repeated at the next one, unless that could make a second job: a request without a request_id, which may have
been accepted. Watches go on with the job's current state.

No caller sees a job go back to an earlier state: the scheduler tells of the end or the deletion of a job only once the
database has it, and each read here sees what is committed. What the database says of a live job is not used, because
the scheduler knows its newer state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import grpc

from bottega.addons.interface.views import Access
from bottega.background_tasks import BackgroundTasks
from bottega.errors import DataLoss, StorageUnavailable
from bottega.gateway.api.following import PAUSE_S, FollowerAdmission
from bottega.gateway.api.image_service import ImageService, submitted
from bottega.gateway.api.scheduler_calls import InterruptedCall, SchedulerCalls
from bottega.gateway.api.watching import job_to_wire
from bottega.gateway.api.webhook_service import WebhookService
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.store import LIVE
from bottega.gateway.scheduler_role import LeaseHolder
from bottega.rpc.security.caller import caller
from bottega.rpc.status import from_job_error
from bottega.v1 import image_pb2, image_pb2_grpc, webhook_pb2, webhook_pb2_grpc

# Seconds after which the scheduler is asked instead of the database. A healthy one takes milliseconds.
_READ_S = 1.0
_NO_REQUEST = image_pb2.GenerateRequest()

_Context = grpc.aio.ServicerContext[Any, Any]
_Read = TypeVar("_Read")


class ForwardingImageService(image_pb2_grpc.ImageServiceServicer):
    """The public gRPC service of a gateway that shares its jobs with others.

    Args:
        local: The service of this gateway, which answers while this one is the scheduler.
        calls: Calls the scheduler.
        jobs: The jobs of this gateway, which `local` reads.
        admission: Admits jobs while another gateway is the scheduler.
    """

    def __init__(
        self, local: ImageService, calls: SchedulerCalls, jobs: JobRepository, admission: FollowerAdmission
    ) -> None:
        self._local = local
        self._admission = admission
        self._calls = calls
        self._jobs = jobs
        self._paused_until = 0.0
        self._reading = BackgroundTasks("reading of jobs from the database")

    async def ListModels(self, request: image_pb2.ListModelsRequest, context: _Context) -> image_pb2.ListModelsResponse:
        """List the models that are served now: all services have joined this gateway too."""
        return await self._local.ListModels(request, context)

    async def ListAdapters(
        self, request: image_pb2.ListAdaptersRequest, context: _Context
    ) -> image_pb2.ListAdaptersResponse:
        """Return a page of adapters: all stores have joined this gateway too."""
        return await self._local.ListAdapters(request, context)

    async def SubmitJob(self, request: image_pb2.SubmitJobRequest, context: _Context) -> image_pb2.SubmitJobResponse:
        """Accept a request: here if the scheduler has a place for it, else at the scheduler."""
        if self._reads_here(context):
            received = self._local.received(request, context)
            if (job := await self._admission.submit(request.spec, received, Access.of(caller()))) is not None:
                return submitted(job)
        answer: image_pb2.SubmitJobResponse
        answer = await self._unary("SubmitJob", request, context, repeatable=bool(request.request_id))
        return answer

    async def GetJob(self, request: image_pb2.GetJobRequest, context: _Context) -> image_pb2.GetJobResponse:
        """Return the state of a job."""
        if (job := await self._ended_job(request.job_id, context)) is not None:
            return image_pb2.GetJobResponse(job=job_to_wire(job))
        answer: image_pb2.GetJobResponse = await self._unary("GetJob", request, context)
        return answer

    async def ListJobs(self, request: image_pb2.ListJobsRequest, context: _Context) -> image_pb2.ListJobsResponse:
        """Return a page of jobs. The scheduler is asked if it could have live ones."""
        if not LIVE.intersection(request.states):
            page = await self._read(context, lambda: self._local.ListJobs(request, context))
            if page is not None and all(job.state not in LIVE for job in page.jobs):
                return page
        answer: image_pb2.ListJobsResponse = await self._unary("ListJobs", request, context)
        return answer

    async def CancelJob(self, request: image_pb2.CancelJobRequest, context: _Context) -> image_pb2.CancelJobResponse:
        """Cancel a job at the scheduler."""
        answer: image_pb2.CancelJobResponse = await self._unary("CancelJob", request, context)
        return answer

    async def DeleteJob(self, request: image_pb2.DeleteJobRequest, context: _Context) -> image_pb2.DeleteJobResponse:
        """Delete a job at the scheduler."""
        answer: image_pb2.DeleteJobResponse = await self._unary("DeleteJob", request, context)
        return answer

    async def GetJobTrace(
        self, request: image_pb2.GetJobTraceRequest, context: _Context
    ) -> image_pb2.GetJobTraceResponse:
        """Return the trace of a job from the scheduler, which drew it."""
        answer: image_pb2.GetJobTraceResponse = await self._unary("GetJobTrace", request, context)
        return answer

    async def GetImage(
        self, request: image_pb2.GetImageRequest, context: _Context
    ) -> AsyncIterator[image_pb2.GetImageResponse]:
        """Stream a finished image, or answer with its URL, which only the scheduler makes."""
        if not request.as_url and (job := await self._ended_job(request.job_id, context)) is not None:
            reader = None
            with contextlib.suppress(StorageUnavailable, DataLoss):  # the scheduler may have another copy
                reader = await self._local.open_image(job, request.index)
            if reader is not None:
                async with contextlib.aclosing(self._local.chunks(job, request.index, reader)) as chunks:
                    async for answer in chunks:
                        yield answer
                return
        begun = False
        while True:
            try:
                async with self._answers("GetImage", request, context) as answers:
                    async for answer in answers:
                        begun = True
                        yield answer
                return
            except InterruptedCall as interruption:
                await self._calls.retry(interruption, repeatable=not begun)  # the next scheduler would begin again

    async def WatchJob(
        self, request: image_pb2.WatchJobRequest, context: _Context
    ) -> AsyncGenerator[image_pb2.WatchJobResponse, None]:
        """Stream the events of a live job from the scheduler, and then from the next one."""
        if (job := await self._ended_job(request.job_id, context)) is not None:
            async with contextlib.aclosing(self._local.watch(job, preview=request.preview)) as events:
                async for event in events:
                    yield event
            return
        while True:
            try:
                async with self._answers("WatchJob", request, context) as answers:
                    async for answer in answers:
                        yield answer
                return
            except InterruptedCall as interruption:
                await self._calls.retry(interruption, repeatable=not self._calls.draining)

    async def Generate(
        self, request: image_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[image_pb2.GenerateResponse]:
        """Draw a request at the scheduler. If it has a request_id, the stream goes on at the next one."""
        goes_on, preview, job_id = bool(request.request_id), request.preview, ""
        while not job_id:
            try:
                async with self._answers("Generate", request, context) as answers:
                    async for answer in answers:
                        job_id = answer.event.job_id
                        request = _NO_REQUEST  # with images it is large, and the job has them
                        yield answer
                return
            except InterruptedCall as interruption:
                repeatable = goes_on or (interruption.refused and not job_id)
                await self._calls.retry(interruption, repeatable=repeatable and not self._calls.draining)
        watch = image_pb2.WatchJobRequest(job_id=job_id, preview=preview)
        async with contextlib.aclosing(self.WatchJob(watch, context)) as answers:
            async for answer in answers:
                if answer.event.HasField("failed"):
                    raise from_job_error(answer.event.failed)
                yield image_pb2.GenerateResponse(event=answer.event)

    def _reads_here(self, context: _Context) -> bool:
        paused = asyncio.get_running_loop().time() < self._paused_until
        return self._jobs.readable and not paused and self._calls.follows(context)

    async def _ended_job(self, job_id: str, context: _Context) -> Job | None:
        """Return a job that has ended, read here; None if the scheduler has to be asked. Raises JobNotFound."""
        job = await self._read(context, lambda: self._local.find_job(job_id))
        return None if job is None or job.live else job

    async def _read(self, context: _Context, read: Callable[[], Coroutine[Any, Any, _Read]]) -> _Read | None:
        """Return what this gateway reads from the database; None if the scheduler has to be asked.

        A read that takes too long goes on alone, because to cancel it would wait for an answer of the database.
        """
        if not self._reads_here(context):
            return None
        try:
            return await asyncio.wait_for(self._reading.run_shielded(read()), _READ_S)
        except (StorageUnavailable, TimeoutError):
            self._paused_until = asyncio.get_running_loop().time() + PAUSE_S
        except DataLoss:  # the scheduler says what it is
            pass
        return None

    async def close(self) -> None:
        """End the reads that are under way."""
        await self._reading.cancel()

    async def _unary(self, method: str, request: Any, context: _Context, *, repeatable: bool = True) -> Any:
        return await self._calls.unary(
            method, request, context, local=self._local, stub_of=self._stub_of, repeatable=repeatable
        )

    def _answers(
        self, method: str, request: Any, context: _Context
    ) -> contextlib.AbstractAsyncContextManager[AsyncIterator[Any]]:
        return self._calls.stream(method, request, context, local=self._local, stub_of=self._stub_of)

    def _stub_of(self, scheduler: LeaseHolder) -> Any:
        return image_pb2_grpc.ImageServiceStub(self._calls.channel(scheduler.address))


class ForwardingWebhookService(webhook_pb2_grpc.WebhookServiceServicer):
    """The service of webhooks of a gateway that shares its jobs with others: the scheduler delivers them.

    Args:
        local: The service of this gateway, which answers while this one is the scheduler.
        calls: Calls the scheduler.
    """

    def __init__(self, local: WebhookService, calls: SchedulerCalls) -> None:
        self._local = local
        self._calls = calls

    async def ListWebhookEvents(
        self, request: webhook_pb2.ListWebhookEventsRequest, context: _Context
    ) -> webhook_pb2.ListWebhookEventsResponse:
        """Return a page of events from the scheduler."""
        answer: webhook_pb2.ListWebhookEventsResponse = await self._unary("ListWebhookEvents", request, context)
        return answer

    async def ReplayWebhookEvents(
        self, request: webhook_pb2.ReplayWebhookEventsRequest, context: _Context
    ) -> webhook_pb2.ReplayWebhookEventsResponse:
        """Deliver events again, by the scheduler. Receivers know events that they get twice by their IDs."""
        answer: webhook_pb2.ReplayWebhookEventsResponse = await self._unary("ReplayWebhookEvents", request, context)
        return answer

    async def _unary(self, method: str, request: Any, context: _Context) -> Any:
        return await self._calls.unary(method, request, context, local=self._local, stub_of=self._stub_of)

    def _stub_of(self, scheduler: LeaseHolder) -> Any:
        return webhook_pb2_grpc.WebhookServiceStub(self._calls.channel(scheduler.fleet_address))
