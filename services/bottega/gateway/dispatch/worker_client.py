"""Calls to one worker over gRPC; every failure comes out as a BottegaError."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence

import grpc

from bottega.errors import (
    BottegaError,
    InternalError,
    JobCancelled,
    MethodNotServed,
    ReaderStalled,
    StaleAttempt,
    Unavailable,
    WorkerLost,
)
from bottega.gateway.dispatch.connection import AttemptEvents, is_death
from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import worker_pb2, worker_pb2_grpc

# Failures of a call that say nothing about the job, and so do those that gRPC made: another worker may well draw it.
_OF_THE_WORKER = (InternalError, JobCancelled, MethodNotServed, ReaderStalled, StaleAttempt)

# After them the worker ends the call by itself, at once. Were it cancelled first, the worker would count a cancelled
# call, and keep the images for somebody who still wants them.
_LAST_WORDS = ("completed", "failed")
_END_S = 2.0
# In which a worker that lives can be reached again: sooner than its lease ends.
_ALIVE_S = 1.0

_AttemptCall = grpc.aio.UnaryStreamCall[worker_pb2.RunAttemptRequest, worker_pb2.RunAttemptResponse]


class GrpcWorkerClient:
    """The WorkerClient of the dispatcher. Connects by itself and reconnects."""

    def __init__(self, target: Target, channels: Channels) -> None:
        self._channel = channels.open(target)
        self._worker: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def run_attempt(self, request: worker_pb2.RunAttemptRequest) -> AttemptEvents:
        """Starts an attempt before it returns, and streams its events."""
        return self._events(self._worker.RunAttempt(request), request.attempt)

    async def checkpoints(self) -> AsyncGenerator[worker_pb2.WatchCheckpointsResponse, None]:
        """Streams the newest checkpoint of every attempt."""
        call = self._worker.WatchCheckpoints(worker_pb2.WatchCheckpointsRequest())
        try:
            with _typed_failures():
                async for checkpoint in call:
                    yield checkpoint
        finally:
            call.cancel()

    async def cancel_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        """Stops an attempt and forgets it."""
        with _typed_failures():
            await self._worker.CancelAttempt(worker_pb2.CancelAttemptRequest(attempt=attempt), timeout=deadline_s)

    async def list_attempts(self, *, deadline_s: float) -> Sequence[worker_pb2.AttemptSummary]:
        """What it runs, and what is finished and was not forgotten yet."""
        with _typed_failures():
            return (await self._worker.ListAttempts(worker_pb2.ListAttemptsRequest(), timeout=deadline_s)).attempts

    async def preview_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        """Asks for previews of an attempt from now on."""
        with _typed_failures():
            await self._worker.PreviewAttempt(worker_pb2.PreviewAttemptRequest(attempt=attempt), timeout=deadline_s)

    async def close(self) -> None:
        """Ends every call."""
        await self._channel.close()

    async def _events(self, call: _AttemptCall, attempt: worker_pb2.AttemptId) -> AttemptEvents:
        answered = False
        try:
            async for event in call:
                answered = True
                if event.WhichOneof("event") in _LAST_WORDS:
                    await _ended(call)
                yield event
        except grpc.aio.AioRpcError as error:
            if not answered and self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise Unavailable("the worker cannot be reached") from None
            lost = _typed(error, answered=answered)
            if is_death(lost) and await self._still_has(attempt):
                lost = WorkerLost("the connection to the worker broke, and the worker lives")
            raise lost from None
        finally:
            call.cancel()

    async def _still_has(self, attempt: worker_pb2.AttemptId) -> bool:
        """Whether the worker has an attempt whose call broke: then the way to it broke, and nobody died.

        One that was started again meanwhile does not know the attempt.
        """
        try:
            held = await self.list_attempts(deadline_s=_ALIVE_S)
        except BottegaError:
            return False
        return any(summary.attempt == attempt for summary in held)


async def _ended(call: _AttemptCall) -> None:
    """Waits until the worker has ended a call, for a while; how does not matter any more."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(call.code(), _END_S)


@contextlib.contextmanager
def _typed_failures() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _typed(error) from None


def _typed(failure: grpc.aio.AioRpcError, *, answered: bool = False) -> BottegaError:
    """answered: whether the worker had begun to answer."""
    error = from_rpc_error(failure)
    if type(error) is Unavailable:
        # A broken connection is how the death of a process shows. Before its first word it may have been dead.
        return WorkerLost("the connection to the worker broke", metadata={"died": "worker"} if answered else None)
    if isinstance(error, _OF_THE_WORKER) or not was_answered(failure):
        return WorkerLost(f"the call to the worker failed: {failure.code().name}")
    return error
