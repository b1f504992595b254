"""The client of one worker, which calls it over gRPC and types every failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import grpc

from bottega.errors import (
    BottegaError,
    InternalError,
    JobCancelled,
    MethodNotServed,
    ReaderStalled,
    StaleAttempt,
    StaleScheduler,
    Unavailable,
    WorkerLost,
)
from bottega.rpc.channel import MAX_ATTEMPT_MIB, Channels, Target
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import worker_pb2, worker_pb2_grpc

AttemptEvents = AsyncGenerator[worker_pb2.RunAttemptResponse, None]

# Errors that are not the fault of the job, like those that gRPC itself raises: another worker may draw it.
_OF_THE_WORKER = (InternalError, JobCancelled, MethodNotServed, ReaderStalled, StaleAttempt, StaleScheduler)

# After these events the worker ends the call by itself, at once. If the call were cancelled first, the worker would
# count a cancelled call, and keep the images for another caller.
_FINAL_EVENTS = ("completed", "failed")
_END_S = 2.0
# Time within which a worker that lives can be reached again: shorter than its lease.
_ALIVE_S = 1.0

_AttemptCall = grpc.aio.UnaryStreamCall[worker_pb2.RunAttemptRequest, worker_pb2.RunAttemptResponse]


def is_death(error: BottegaError) -> bool:
    """Return whether an attempt failed because its worker or engine died, which the job may have caused."""
    return isinstance(error, WorkerLost) and "died" in error.metadata


def died_alone(error: BottegaError) -> bool:
    """Return whether no other attempt died together with this one, as far as the worker reported."""
    return error.metadata.get("held_together", "1") == "1"


class WorkerClient:
    """The client of one worker, which connects and reconnects by itself. Every failure is a BottegaError.

    WorkerLost means that the connection broke, as when the worker dies (see is_death), or that the worker gave up the
    attempt. Other Unavailable errors and QueueFull mean that the worker did not accept the attempt.

    Args:
        generation: Returns the generation of the scheduler's lease, 0 if the jobs are not shared. A worker refuses
            calls of an older one than it knows.
    """

    def __init__(self, target: Target, channels: Channels, generation: Callable[[], int] = lambda: 0) -> None:
        self._channel = channels.open(target, max_message_mib=MAX_ATTEMPT_MIB)
        self._generation = generation
        self._worker: worker_pb2_grpc.WorkerServiceAsyncStub = worker_pb2_grpc.WorkerServiceStub(self._channel)

    def run_attempt(self, request: worker_pb2.RunAttemptRequest) -> AttemptEvents:
        """Start an attempt before returning, and stream its events."""
        request.attempt.CopyFrom(self._fenced(request.attempt))
        return self._events(self._worker.RunAttempt(request), request.attempt)

    async def checkpoints(self) -> AsyncGenerator[worker_pb2.WatchCheckpointsResponse, None]:
        """Stream the newest checkpoint of every attempt."""
        call = self._worker.WatchCheckpoints(worker_pb2.WatchCheckpointsRequest())
        try:
            with _typed_failures():
                async for checkpoint in call:
                    yield checkpoint
        finally:
            call.cancel()

    async def cancel_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        """Stop an attempt and delete the worker's data about it."""
        request = worker_pb2.CancelAttemptRequest(attempt=self._fenced(attempt))
        with _typed_failures():
            await self._worker.CancelAttempt(request, timeout=deadline_s)

    async def list_attempts(self, *, deadline_s: float) -> Sequence[worker_pb2.AttemptSummary]:
        """List the attempts that the worker runs, and finished ones that it still keeps."""
        with _typed_failures():
            return (await self._worker.ListAttempts(worker_pb2.ListAttemptsRequest(), timeout=deadline_s)).attempts

    async def preview_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        """Ask the worker to send previews of an attempt from now on."""
        request = worker_pb2.PreviewAttemptRequest(attempt=self._fenced(attempt))
        with _typed_failures():
            await self._worker.PreviewAttempt(request, timeout=deadline_s)

    async def close(self) -> None:
        """End every call."""
        await self._channel.close()

    def _fenced(self, attempt: worker_pb2.AttemptId) -> worker_pb2.AttemptId:
        """Return the ID of an attempt with the generation of this gateway's lease."""
        return worker_pb2.AttemptId(job_id=attempt.job_id, number=attempt.number, generation=self._generation())

    async def _events(self, call: _AttemptCall, attempt: worker_pb2.AttemptId) -> AttemptEvents:
        answered = False
        try:
            async for event in call:
                answered = True
                if event.WhichOneof("event") in _FINAL_EVENTS:
                    await _ended(call)
                yield event
        except grpc.aio.AioRpcError as error:
            if not answered and self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                raise Unavailable("the worker cannot be reached") from None
            lost = _typed(error, answered=answered)
            if is_death(lost) and await self._still_has(attempt):
                lost = WorkerLost("the connection to the worker was lost, but the worker still runs the attempt")
            raise lost from None
        finally:
            call.cancel()

    async def _still_has(self, attempt: worker_pb2.AttemptId) -> bool:
        """Return whether the worker still runs an attempt whose call failed: then only the connection was lost.

        A worker that was restarted meanwhile does not know the attempt.
        """
        try:
            held = await self.list_attempts(deadline_s=_ALIVE_S)
        except BottegaError:
            return False
        return any(summary.attempt == attempt for summary in held)


async def _ended(call: _AttemptCall) -> None:
    """Wait briefly until the worker has ended a call, with or without an error."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(call.code(), _END_S)


@contextlib.contextmanager
def _typed_failures() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _typed(error) from None


def _typed(failure: grpc.aio.AioRpcError, *, answered: bool = False) -> BottegaError:
    """Convert the error of a failed call. `answered` says whether the worker had already sent an event."""
    error = from_rpc_error(failure)
    if type(error) is Unavailable:
        # The death of a process shows as a broken connection. Before its first answer it may have been dead already.
        return WorkerLost("the connection to the worker broke", metadata={"died": "worker"} if answered else None)
    if isinstance(error, _OF_THE_WORKER) or not was_answered(failure):
        return WorkerLost(f"the call to the worker failed: {failure.code().name}")
    return error
