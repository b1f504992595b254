"""The gRPC service of a worker: checks WorkerService's messages, and converts them to calls of the worker and back.

RunAttempt takes its request as bytes, so that a request with an image of some MiB is parsed in a thread and not on the
event loop. The caller need not be a gateway that has checked everything. `Worker` checks whether it serves the model.
The engine checks what depends on the model, such as its limits and which multiple its sizes must be.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import grpc
from google.protobuf.message import DecodeError

from bottega import adapter_rules, kinds, rules
from bottega.background_tasks import copied
from bottega.codec.structure import MAX_IMAGE_BYTES
from bottega.errors import InvalidRequest, Violation
from bottega.rpc.operation import logs
from bottega.rpc.security.caller import LEAST_WEIGHT, MOST_WEIGHT
from bottega.rpc.status import to_job_error
from bottega.schedules import check_sampler_schedule, check_schedule
from bottega.v1 import worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.worker.attempts import (
    Attempt,
    AttemptKey,
    CompletedEvent,
    Event,
    FailedEvent,
    KeptEvent,
    PictureEvent,
    ProgressEvent,
    StartedEvent,
)
from bottega.worker.image_codec import AttemptInputs
from bottega.worker.worker import Worker

_log = logging.getLogger(__name__)

# Fields that the gateway fills in, and that must be present here.
_FILLED_IN = ("num_inference_steps", "guidance_scale", "width", "height", "seed", "num_images")

# Upper bound on job IDs, which the gateway creates, and request IDs, which it checks.
_MAX_ID_CHARACTERS = 128
_MAX_TENANT_CHARACTERS = 128
_MAX_ADDONS = 16
_MAX_ADDON_BYTES = 256 << 10


def read_attempt(raw: bytes) -> tuple[worker_pb2.RunAttemptRequest, AttemptInputs]:
    """Parse and check a serialized RunAttemptRequest. Return it without its large inputs, and those separately.

    Raises:
        InvalidRequest: The request breaks rules; the error names all violations.
    """
    try:
        request = worker_pb2.RunAttemptRequest.FromString(raw)
    except DecodeError:
        raise InvalidRequest("the request is not a RunAttemptRequest") from None
    rules.refuse(
        [
            *_check_attempt(request.attempt),
            *_check_spec(request.spec),
            *_check_call(request),
            *_check_controls(request),
            *_check_kept(request),
            *_check_loras(request),
            *_check_addons(request),
            *_check_share(request),
        ]
    )
    if not request.HasField("share"):
        request.share.weight = 1.0
    inputs = AttemptInputs.take_from(request)
    # A message keeps the memory of its cleared fields for as long as it lives; its copy has none of it.
    return worker_pb2.RunAttemptRequest.FromString(request.SerializeToString()), inputs


def checked_key(attempt: worker_pb2.AttemptId) -> AttemptKey:
    """Return the key of an attempt. Raises InvalidRequest if the message has none."""
    rules.refuse(list(_check_attempt(attempt)))
    return AttemptKey.of(attempt)


def _check_attempt(attempt: worker_pb2.AttemptId) -> Iterator[Violation]:
    if not 0 < len(attempt.job_id) <= _MAX_ID_CHARACTERS:
        yield Violation(field="attempt.job_id", description=f"must be 1 to {_MAX_ID_CHARACTERS} characters")
    if attempt.number < 1:
        yield Violation(field="attempt.number", description="must be at least 1")
    if attempt.generation < 0:
        yield Violation(field="attempt.generation", description="must not be negative")


def _check_spec(spec: GenerationSpec) -> Iterator[Violation]:
    for name in _FILLED_IN:
        if not spec.HasField(name):  # type: ignore[arg-type]
            yield Violation(field=f"spec.{name}", description="must be filled in")
    yield from rules.check_texts(spec)
    yield from rules.check_prompts(spec)
    yield from rules.check_model_name(spec)
    yield from rules.check_ranges(spec)
    if spec.sampler:  # an absent sampler stands for the model's default, which is not known here
        yield from rules.check_sigmas(spec, spec.sampler)
        yield from check_sampler_schedule(spec, spec.sampler, spec.use_karras_sigmas)
    yield from check_schedule(spec)
    yield from rules.check_techniques(spec)
    if spec.techniques.HasField("recording"):
        rule = "must be absent: recordings are not kept as they were at the time of an earlier edit"
        yield Violation(field="spec.techniques.recording", description=rule)
    yield from adapter_rules.check_controlnets(spec)
    yield from adapter_rules.check_loras(spec)
    strength = spec.strength if spec.HasField("strength") else None
    yield from adapter_rules.check_lora_steps(spec, spec.num_inference_steps, strength)
    if spec.HasField("image") and not 0 < len(spec.image) <= MAX_IMAGE_BYTES:
        yield Violation(field="spec.image", description=f"must be 1 to {MAX_IMAGE_BYTES} bytes")
    yield from rules.check_edit(spec)
    if spec.HasField("mask_image"):
        if not 0 < len(spec.mask_image) <= MAX_IMAGE_BYTES:
            yield Violation(field="spec.mask_image", description=f"must be 1 to {MAX_IMAGE_BYTES} bytes")
        if not spec.HasField("keep_unmasked"):
            yield Violation(field="spec.keep_unmasked", description="must be set if mask_image is set")
        elif spec.keep_unmasked and not spec.HasField("mask_feather"):
            yield Violation(field="spec.mask_feather", description="must be set if keep_unmasked is true")
    if spec.HasField("strength") != spec.HasField("image"):
        yield Violation(field="spec.strength", description="must be set if image is set, and absent otherwise")


def _check_controls(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    for index, net in enumerate(request.spec.controlnets):
        if not 0 < len(net.image) <= MAX_IMAGE_BYTES:
            rule = f"must be 1 to {MAX_IMAGE_BYTES} bytes"
            yield Violation(field=f"spec.controlnets[{index}].image", description=rule)


def _check_kept(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    if len(request.kept) > rules.MAX_KEPT_BYTES:
        rule = f"must be at most {rules.MAX_KEPT_BYTES} bytes"
        yield Violation(field="kept", description=rule)
    elif request.kept and not request.spec.HasField("mask_image"):
        yield Violation(field="kept", description="must be empty without spec.mask_image")


def _check_loras(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    for index, lora in enumerate(request.spec.loras):
        for name in ("scale", "digest", "max_step"):
            if not lora.HasField(name):
                yield Violation(field=f"spec.loras[{index}].{name}", description="must be filled in")


def _check_addons(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    """Yield violations of the bounds on add-ons' data. The engine's add-ons check its content."""
    for name, messages in (("addons", request.addons), ("decisions.by_kind", request.decisions.by_kind)):
        if len(messages) > _MAX_ADDONS or not all(map(kinds.is_kind, messages)):
            yield Violation(field=name, description=f"must have at most {_MAX_ADDONS} entries, by kind of service")
        if any(len(message) > _MAX_ADDON_BYTES for message in messages.values()):
            yield Violation(field=name, description=f"must have at most {_MAX_ADDON_BYTES} bytes each")


def _check_share(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    if not request.HasField("share"):
        return
    if len(request.share.tenant) > _MAX_TENANT_CHARACTERS:
        yield Violation(field="share.tenant", description=f"must be at most {_MAX_TENANT_CHARACTERS} characters")
    # Written so that NaN breaks the rule.
    if not LEAST_WEIGHT <= request.share.weight <= MOST_WEIGHT:
        yield Violation(field="share.weight", description=f"must be from {LEAST_WEIGHT:g} to {MOST_WEIGHT:g}")


def _check_call(request: worker_pb2.RunAttemptRequest) -> Iterator[Violation]:
    if len(request.request_id) > _MAX_ID_CHARACTERS:
        yield Violation(field="request_id", description=f"must be at most {_MAX_ID_CHARACTERS} characters")
    # Written so that NaN breaks the rule.
    if request.HasField("deadline_s") and not request.deadline_s >= 0:
        yield Violation(field="deadline_s", description="must not be negative")


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
        return worker_pb2.CancelAttemptResponse(known=self._worker.cancel(self._fenced(request.attempt)))

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
        return worker_pb2.PreviewAttemptResponse(known=self._worker.preview(self._fenced(request.attempt)))

    def _fenced(self, attempt: worker_pb2.AttemptId) -> AttemptKey:
        """Return the key of an attempt. Raises InvalidRequest, and StaleScheduler for calls of an earlier scheduler."""
        key = checked_key(attempt)
        self._worker.fence.check(attempt.generation)
        return key

    async def _started(self, raw: bytes) -> Attempt:
        request, inputs = await copied(len(raw), lambda: read_attempt(raw))
        ids = {"job_id": request.attempt.job_id, "request_id": request.request_id}
        logs.bind(**{name: logs.request_id_from(text) for name, text in ids.items()})
        self._worker.fence.check(request.attempt.generation)
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
