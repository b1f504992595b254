"""The gRPC service of a worker: converts WorkerService's messages to calls of the worker and back.

RunAttempt takes its request as bytes, so that a request with an image of some MiB is parsed in a thread and not on the
event loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import grpc

from bottega.background_tasks import copied
from bottega.rpc.operation import logs
from bottega.rpc.status import to_job_error
from bottega.v1 import worker_pb2
from bottega.worker.attempts import (
    Attempt,
    CompletedEvent,
    Event,
    FailedEvent,
    KeptEvent,
    PictureEvent,
    ProgressEvent,
    StartedEvent,
)
from bottega.worker.validation import checked_key, read_attempt
from bottega.worker.worker import Worker

_log = logging.getLogger(__name__)

SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name

# Building and sending a chunk of this size takes some hundred microseconds of the event loop.
_CHUNK_BYTES = 256 * 2**10

_Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService:
    """The servicer of bottega.v1.WorkerService."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods at a server."""
        pb = worker_pb2
        handlers = {
            "RunAttempt": cast(Any, grpc.unary_stream_rpc_method_handler)(
                self.run_attempt, None, pb.RunAttemptResponse.SerializeToString
            ),
            "CancelAttempt": cast(Any, grpc.unary_unary_rpc_method_handler)(
                self.cancel_attempt, pb.CancelAttemptRequest.FromString, pb.CancelAttemptResponse.SerializeToString
            ),
            "ListAttempts": cast(Any, grpc.unary_unary_rpc_method_handler)(
                self.list_attempts, pb.ListAttemptsRequest.FromString, pb.ListAttemptsResponse.SerializeToString
            ),
            "WatchCheckpoints": cast(Any, grpc.unary_stream_rpc_method_handler)(
                self.watch_checkpoints,
                pb.WatchCheckpointsRequest.FromString,
                pb.WatchCheckpointsResponse.SerializeToString,
            ),
            "PreviewAttempt": cast(Any, grpc.unary_unary_rpc_method_handler)(
                self.preview_attempt, pb.PreviewAttemptRequest.FromString, pb.PreviewAttemptResponse.SerializeToString
            ),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))

    async def run_attempt(self, raw: bytes, _context: _Context) -> AsyncIterator[worker_pb2.RunAttemptResponse]:
        """Serve RunAttempt."""
        attempt = await self._started(raw)
        del raw  # the stream may last minutes, and the image need not
        async for event in attempt.follow():
            for response in _responses(event):
                yield response

    async def cancel_attempt(
        self, request: worker_pb2.CancelAttemptRequest, _context: _Context
    ) -> worker_pb2.CancelAttemptResponse:
        """Serve CancelAttempt."""
        return worker_pb2.CancelAttemptResponse(known=self._worker.cancel(checked_key(request.attempt)))

    async def list_attempts(
        self, _request: worker_pb2.ListAttemptsRequest, _context: _Context
    ) -> worker_pb2.ListAttemptsResponse:
        """Serve ListAttempts."""
        return worker_pb2.ListAttemptsResponse(attempts=[_summary(attempt) for attempt in self._worker.attempts])

    async def watch_checkpoints(
        self, _request: worker_pb2.WatchCheckpointsRequest, _context: _Context
    ) -> AsyncIterator[worker_pb2.WatchCheckpointsResponse]:
        """Serve WatchCheckpoints."""
        async for checkpoint in self._worker.checkpoints.watch():
            yield worker_pb2.WatchCheckpointsResponse(
                attempt=checkpoint.key.message(), steps_done=checkpoint.steps_done, checkpoint=checkpoint.data
            )

    async def preview_attempt(
        self, request: worker_pb2.PreviewAttemptRequest, _context: _Context
    ) -> worker_pb2.PreviewAttemptResponse:
        """Serve PreviewAttempt."""
        return worker_pb2.PreviewAttemptResponse(known=self._worker.preview(checked_key(request.attempt)))

    async def _started(self, raw: bytes) -> Attempt:
        request, inputs = await copied(len(raw), lambda: read_attempt(raw))
        ids = {"job_id": request.attempt.job_id, "request_id": request.request_id}
        logs.bind(**{name: logs.request_id_from(text) for name, text in ids.items()})
        return self._worker.run(request, inputs)


def _responses(event: Event) -> Iterator[worker_pb2.RunAttemptResponse]:
    pb = worker_pb2
    match event:
        case StartedEvent(steps_total=total, steps_resumed=resumed):
            yield pb.RunAttemptResponse(started=pb.AttemptStarted(steps_total=total, steps_resumed=resumed))
        case pb.AttemptDecisions():
            yield pb.RunAttemptResponse(decided=event)
        case ProgressEvent(steps_done=done, device_s=device_s, preview_index=index, preview_jpeg=jpeg):
            progress = pb.AttemptProgress(steps_done=done, device_s=device_s, preview_index=index, preview_jpeg=jpeg)
            yield pb.RunAttemptResponse(progress=progress)
        case PictureEvent():
            for index, chunk, last in _chunks(event):
                yield pb.RunAttemptResponse(image=pb.AttemptImageChunk(index=index, chunk=chunk, last=last))
        case KeptEvent():
            for index, chunk, last in _chunks(event):
                yield pb.RunAttemptResponse(kept=pb.AttemptKeptChunk(index=index, chunk=chunk, last=last))
        case CompletedEvent(provenance=provenance, trace=trace):
            yield pb.RunAttemptResponse(trace=trace)
            yield pb.RunAttemptResponse(completed=pb.AttemptCompleted(provenance=provenance))
        case FailedEvent(error=error, trace=trace):
            if trace.spans:
                yield pb.RunAttemptResponse(trace=trace)
            yield pb.RunAttemptResponse(failed=to_job_error(error))


def _chunks(part: PictureEvent | KeptEvent) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the index of the image, the next bytes, and whether they are the last ones."""
    view = memoryview(part.data)
    for start in range(0, len(view), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        yield part.index, bytes(view[start:end]), end >= len(view)


def _summary(attempt: Attempt) -> worker_pb2.AttemptSummary:
    return worker_pb2.AttemptSummary(
        attempt=attempt.key.message(),
        steps_done=attempt.steps_done,
        finished=attempt.ended and not attempt.fetched,
    )
