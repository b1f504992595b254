"""The public API of a gateway that shares its jobs with others: calls about jobs are answered by the scheduler.

Every gateway accepts every call. One that is not the scheduler passes it on to the gateway that is, with the caller's
identity and deadline, so that quotas, the bounds of the queue and request_ids hold over all gateways. While there is no
scheduler, calls wait for the next one. A call whose scheduler dies is repeated at the next one, unless that could make
a second job: a request without a request_id, which may have been accepted. Watches go on with the job's current state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, Draining, StorageUnavailable, Unavailable
from bottega.gateway.api.image_service import ImageService
from bottega.gateway.jobs.store import StaleGeneration
from bottega.gateway.scheduler_role import LeaseHolder, SchedulerRole
from bottega.rpc.channel import Channels, Target
from bottega.rpc.interceptor.calls import REQUEST_ID_KEY
from bottega.rpc.operation import logs
from bottega.rpc.security.caller import CALLER_KEY, Role, caller
from bottega.rpc.status import from_job_error, from_rpc_error, was_answered
from bottega.v1 import image_pb2, image_pb2_grpc

# Seconds that a call waits for a scheduler: twice the longest takeover.
_WAIT_S = 10.0
# Seconds before a call is repeated if nothing is known to have changed.
_PAUSE_S = 0.2
# Upper bound on channels to other gateways. Beyond it, the one that was opened first is closed.
_MAX_CHANNELS = 16
# Key of the metadata with which a gateway passes a call on. Its receiver passes it on no further.
_FORWARDED_KEY = "x-bottega-forwarded"
# Metadata of a caller that goes on to the scheduler: who the caller is, and to which trace the call belongs.
_KEPT_KEYS = frozenset({"authorization", "traceparent", "tracestate"})

# Seconds after which a caller may try again.
_RETRY_AFTER_S = 1.0

_NO_REQUEST = image_pb2.GenerateRequest()

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, kw_only=True)
class _ForwardedCall:
    """A call to another gateway that has not ended."""

    scheduler: LeaseHolder
    call: Any
    is_stream: bool
    ended_here: bool = False
    """Whether this gateway has ended it, because the other one is not the scheduler any more, or this one stops."""

    def end(self) -> None:
        """End the call."""
        self.ended_here = True
        self.call.cancel()


class _Interrupted(Exception):
    """A call that the scheduler did not answer, and that another one may.

    Args:
        error: The error for the caller if the call is not repeated.
        refused: Whether the call has certainly changed nothing.
    """

    def __init__(self, error: BottegaError, *, refused: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.refused = refused


class ForwardingImageService(image_pb2_grpc.ImageServiceServicer):
    """The public gRPC service of a gateway that shares its jobs with others.

    Args:
        local: The service of this gateway, which answers while this one is the scheduler.
        role: Who the scheduler is.
        channels: Opens channels to other gateways.
        max_message_mib: Upper bound on a message of the public port, in MiB.
    """

    def __init__(self, local: ImageService, role: SchedulerRole, channels: Channels, *, max_message_mib: int) -> None:
        self._local = local
        self._role = role
        self._channels = channels
        self._max_message_mib = max_message_mib
        self._channels_by_address: dict[str, grpc.aio.Channel] = {}
        self._forwarded: list[_ForwardedCall] = []
        self._draining = False
        self._watching = BackgroundTasks("watching for a new scheduler")

    def start(self) -> None:
        """Start to end calls to gateways that are not the scheduler any more: one that is frozen ends none."""
        self._watching.start(self._end_stale_calls())

    def drain(self) -> None:
        """End all streams, whose callers go on at another gateway. Other calls are still answered."""
        self._draining = True
        for forwarded in self._forwarded:
            if forwarded.is_stream:
                forwarded.end()

    async def close(self) -> None:
        """Close the channels to other gateways."""
        await self._watching.cancel()
        for channel in self._channels_by_address.values():
            await channel.close()

    async def ListModels(self, request: image_pb2.ListModelsRequest, context: _Context) -> image_pb2.ListModelsResponse:
        """List the models that are served now: all services have joined this gateway too."""
        return await self._local.ListModels(request, context)

    async def ListAdapters(
        self, request: image_pb2.ListAdaptersRequest, context: _Context
    ) -> image_pb2.ListAdaptersResponse:
        """Return a page of adapters: all stores have joined this gateway too."""
        return await self._local.ListAdapters(request, context)

    async def SubmitJob(self, request: image_pb2.SubmitJobRequest, context: _Context) -> image_pb2.SubmitJobResponse:
        """Accept a request at the scheduler."""
        answer: image_pb2.SubmitJobResponse
        answer = await self._unary("SubmitJob", request, context, repeatable=bool(request.request_id))
        return answer

    async def GetJob(self, request: image_pb2.GetJobRequest, context: _Context) -> image_pb2.GetJobResponse:
        """Return the state of a job at the scheduler."""
        answer: image_pb2.GetJobResponse = await self._unary("GetJob", request, context)
        return answer

    async def ListJobs(self, request: image_pb2.ListJobsRequest, context: _Context) -> image_pb2.ListJobsResponse:
        """Return a page of jobs from the scheduler."""
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
        """Stream a finished image from the scheduler."""
        begun = False
        while True:
            try:
                async with self._answers("GetImage", request, context) as answers:
                    async for answer in answers:
                        begun = True
                        yield answer
                return
            except _Interrupted as interruption:
                await self._retry(interruption, repeatable=not begun)  # the next scheduler would begin again

    async def WatchJob(
        self, request: image_pb2.WatchJobRequest, context: _Context
    ) -> AsyncGenerator[image_pb2.WatchJobResponse, None]:
        """Stream the events of a job from the scheduler, and then from the next one."""
        while True:
            try:
                async with self._answers("WatchJob", request, context) as answers:
                    async for answer in answers:
                        yield answer
                return
            except _Interrupted as interruption:
                await self._retry(interruption, repeatable=not self._draining)

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
            except _Interrupted as interruption:
                repeatable = goes_on or (interruption.refused and not job_id)
                await self._retry(interruption, repeatable=repeatable and not self._draining)
        watch = image_pb2.WatchJobRequest(job_id=job_id, preview=preview)
        async with contextlib.aclosing(self.WatchJob(watch, context)) as answers:
            async for answer in answers:
                if answer.event.HasField("failed"):
                    raise from_job_error(answer.event.failed)
                yield image_pb2.GenerateResponse(event=answer.event)

    async def _unary(self, method: str, request: Any, context: _Context, *, repeatable: bool = True) -> Any:
        while True:
            try:
                scheduler = await self._scheduler(context)
                if scheduler is None:
                    with self._interrupting():
                        return await getattr(self._local, method)(request, context)
                async with self._forward(scheduler, method, request, context, is_stream=False) as call:
                    return await call
            except _Interrupted as interruption:
                await self._retry(interruption, repeatable=repeatable or interruption.refused)

    @contextlib.asynccontextmanager
    async def _answers(self, method: str, request: Any, context: _Context) -> AsyncIterator[AsyncIterator[Any]]:
        """Yield the stream of answers of the scheduler, which may be this gateway. The block may raise _Interrupted."""
        scheduler = await self._scheduler(context)
        if scheduler is not None:
            async with self._forward(scheduler, method, request, context, is_stream=True) as call:
                del request
                yield call
            return
        with self._interrupting():
            async with contextlib.aclosing(getattr(self._local, method)(request, context)) as answers:
                del request
                yield answers

    @contextlib.contextmanager
    def _interrupting(self) -> Iterator[None]:
        """Raise _Interrupted if a call in the block fails because this gateway stops being the scheduler."""
        try:
            yield
        except (Draining, StorageUnavailable) as error:
            if not (_is_for_another(error) or self._role.lost):
                raise
            raise _Interrupted(error, refused=True) from None

    @contextlib.asynccontextmanager
    async def _forward(
        self, scheduler: LeaseHolder, method: str, request: Any, context: _Context, *, is_stream: bool
    ) -> AsyncIterator[Any]:
        """Yield a call to another gateway. Errors in the block are those of the other gateway, or _Interrupted."""
        stub = image_pb2_grpc.ImageServiceStub(self._channel(scheduler.address))
        call = getattr(stub, method)(request, timeout=context.time_remaining(), metadata=self._metadata(context))
        del request  # with images it is large
        forwarded = _ForwardedCall(scheduler=scheduler, call=call, is_stream=is_stream)
        self._forwarded.append(forwarded)
        try:
            yield call
        except grpc.aio.AioRpcError as error:
            typed = from_rpc_error(error)
            if isinstance(typed, Unavailable) and not was_answered(error):
                raise _Interrupted(typed, refused=False) from None
            if _is_for_another(typed):
                raise _Interrupted(typed, refused=True) from None
            raise typed from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not forwarded.ended_here or (task is not None and task.cancelling()):
                raise
            text = "the gateway is stopping" if self._draining else "another gateway has become the scheduler"
            raise _Interrupted(Draining(f"{text}; retry", retry_after_s=_RETRY_AFTER_S), refused=False) from None
        finally:
            self._forwarded.remove(forwarded)
            call.cancel()

    async def _scheduler(self, context: _Context) -> LeaseHolder | None:
        """Wait until there is a scheduler, and return it; None if it is this gateway."""
        is_forwarded = any(key == _FORWARDED_KEY for key, _ in context.invocation_metadata() or ())
        ends = asyncio.get_running_loop().time() + _WAIT_S
        while not self._role.lost:
            if self._role.serves:
                return None
            if self._role.other is not None:
                if is_forwarded:
                    break  # the gateway that passed the call on knows the scheduler by now, or will soon
                return self._role.other
            try:
                await asyncio.wait_for(self._role.change(), ends - asyncio.get_running_loop().time())
            except TimeoutError:
                text = "no gateway is the scheduler, because PostgreSQL cannot be reached or holds no lease; retry"
                raise Unavailable(text, retry_after_s=_RETRY_AFTER_S) from None
        raise Draining("this gateway is not the scheduler; retry, or use another one", retry_after_s=_RETRY_AFTER_S)

    async def _retry(self, interruption: _Interrupted, *, repeatable: bool) -> None:
        """Wait a moment, or for a new scheduler, before a call is repeated. Raise its error if it is not repeated."""
        if not repeatable or self._role.lost:
            raise interruption.error.with_traceback(None) from None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._role.change(), _PAUSE_S)

    async def _end_stale_calls(self) -> None:
        while True:
            await self._role.change()
            for forwarded in self._forwarded:
                if self._role.holder not in (None, forwarded.scheduler):
                    forwarded.end()

    def _metadata(self, context: _Context) -> list[tuple[str, str | bytes]]:
        """Return the metadata of a forwarded call: the caller's identity and the ID and trace of the call."""
        known, request_id = caller(), logs.bound().get("request_id")
        kept = [(key, value) for key, value in context.invocation_metadata() or () if key in _KEPT_KEYS]
        named = [(CALLER_KEY, f"{known.role}/{known.name}")] if known.role in (Role.TENANT, Role.OPERATOR) else []
        return [*kept, *named, *([(REQUEST_ID_KEY, request_id)] if request_id else []), (_FORWARDED_KEY, "1")]

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels_by_address.get(address)
        if channel is None:
            target = Target(address=address, role=Role.GATEWAY)
            channel = self._channels.open(target, max_message_mib=self._max_message_mib)
            self._channels_by_address[address] = channel
            if len(self._channels_by_address) > _MAX_CHANNELS:
                oldest = self._channels_by_address.pop(next(iter(self._channels_by_address)))
                self._watching.start(oldest.close())
        return channel


def _is_for_another(error: BottegaError) -> bool:
    """Return whether a gateway refused a call, and changed nothing, because another one is or becomes the scheduler."""
    return isinstance(error, Draining) or error.metadata.get("cause") == StaleGeneration.CAUSE
