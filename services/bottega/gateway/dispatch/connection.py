"""The connection to one worker: its client, the attempts that it was given, its checkpoints, and small calls to it.

No outcome of a job depends on the small calls: one that fails is logged, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc

from bottega.addons.interface.gateway_addon import Release
from bottega.addons.interface.views import Member
from bottega.background_tasks import BackgroundTasks
from bottega.errors import (
    BottegaError,
    InternalError,
    JobCancelled,
    MethodNotServed,
    ReaderStalled,
    StaleAttempt,
    StaleScheduler,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from bottega.gateway.jobs import conversion
from bottega.gateway.jobs.job import Job
from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.rules import MAX_KEPT_BYTES
from bottega.v1 import worker_pb2, worker_pb2_grpc
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.trace_pb2 import Trace

_CANCEL_DEADLINE_S = 2.0
_PREVIEW_DEADLINE_S = 2.0
_LIST_DEADLINE_S = 2.0
_WATCH_PAUSE_S = 0.5
# Upper bound on simultaneous calls that stop stale attempts of a worker: it may report thousands of them.
MAX_STALE = 64
# Upper bound on a provenance: the four prompts, what was cut off them, and some numbers of each LoRA and ControlNet.
_MAX_PROVENANCE_BYTES = 512 << 10

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

_log = logging.getLogger(__name__)


def is_death(error: BottegaError) -> bool:
    """Return whether an attempt failed because its worker or engine died, which the job may have caused."""
    return isinstance(error, WorkerLost) and "died" in error.metadata


def died_alone(error: BottegaError) -> bool:
    """Return whether no other attempt died together with this one, as far as the worker reported."""
    return error.metadata.get("held_together", "1") == "1"


@dataclass(slots=True, kw_only=True, eq=False)
class DispatchedAttempt:
    """An attempt to run a job on a worker, with everything that the worker has sent for it so far.

    It has many fields, because each kind of message fills another one.
    """

    job: Job
    number: int
    connection: WorkerConnection
    task: asyncio.Task[None] | None = None
    releases: list[Release] = field(default_factory=list)
    """Functions of add-ons to call when the attempt has ended."""
    images: dict[int, bytearray] = field(default_factory=dict)
    """Received bytes of the encoded images, by index."""
    kept: dict[int, bytearray] = field(default_factory=dict)
    """Received bytes of data that add-ons keep for later jobs, such as latents for edits, by image index."""
    size_bytes: int = 0
    provenance: Provenance | None = None
    trace: Trace = field(default_factory=Trace)
    """The worker's trace, which arrives at the end of the attempt."""
    queued_at: float = 0.0
    """Time at which the job was queued, on the monotonic clock."""
    sent_at: float = 0.0
    """Time at which the attempt was sent to the worker, on the monotonic clock."""
    reported_at: float = 0.0
    """Time of the worker's last progress report, or of sending the attempt, on the monotonic clock."""
    traced: bool = False
    started: bool = False
    previewed: bool = False
    device_s: float | None = None
    """Seconds for which the attempt has used the worker's device; None if the worker has not reported any."""

    @property
    def id(self) -> worker_pb2.AttemptId:
        """The ID of the attempt in messages."""
        return worker_pb2.AttemptId(job_id=self.job.job_id, number=self.number)

    @property
    def used_s(self) -> float | None:
        """Device seconds that the worker has reported for the attempt; None if unknown."""
        return 0.0 if self.device_s is None and not self.started else self.device_s

    @property
    def used_until_now_s(self) -> float | None:
        """Device seconds that the attempt will have used if it stops now; None if unknown.

        Encoding is reported with the first step and decoding after the last one. So the time since the last report
        counts as well, up to what the worker measured for both.
        """
        if self.used_s is None:
            return None
        silent_s = self.job.clock.monotonic() - self.reported_at
        return self.used_s + max(0.0, min(silent_s, self.connection.member.load.fixed_s))

    def note_device_s(self, device_s: float) -> None:
        """Store the device seconds that a worker reports for the attempt. Ignore negative and infinite values."""
        self.reported_at = self.job.clock.monotonic()
        if 0.0 < device_s < math.inf:
            self.device_s = device_s

    def note_provenance(self, provenance: Provenance) -> None:
        """Store the provenance that the worker sent last, without fields that this gateway does not know.

        Raises InternalError if it is larger than the provenance of any request can be.
        """
        provenance.DiscardUnknownFields()
        if provenance.ByteSize() > _MAX_PROVENANCE_BYTES:
            raise InternalError(f"the worker's provenance has more than {_MAX_PROVENANCE_BYTES} bytes")
        self.provenance = provenance
        self.note_device_s(provenance.device_s)

    def request_previews(self) -> None:
        """Request previews from the worker once, if the job wants them and the attempt has started."""
        if self.job.preview and self.started and not self.previewed:
            self.previewed = True
            self.connection.enable_previews(self)

    def append_chunk(self, chunk: worker_pb2.AttemptImageChunk, *, max_bytes: int) -> None:
        """Append bytes of an image. Raises TooLarge if all images together exceed max_bytes."""
        self.size_bytes += len(chunk.chunk)
        if self.size_bytes > max_bytes:
            limit = str(max_bytes)
            raise TooLarge(f"the images are larger than {limit} bytes together", metadata={"max_result_bytes": limit})
        self.images.setdefault(chunk.index, bytearray()).extend(chunk.chunk)

    def append_kept(self, chunk: worker_pb2.AttemptKeptChunk) -> None:
        """Append bytes of an image's kept data. Ignore them if the index is unknown or the data is too large."""
        if 0 <= chunk.index < self.job.num_images:
            kept = self.kept.setdefault(chunk.index, bytearray())
            if len(kept) <= MAX_KEPT_BYTES:
                kept.extend(chunk.chunk)

    def kept_data(self, *, max_bytes: int) -> list[bytes]:
        """Return the kept data of each image; b"" for an image without any, or for which max_bytes leaves no space.

        Args:
            max_bytes: Upper bound on the kept data of all images together.
        """
        found = []
        for index in range(self.job.num_images):
            data = self.kept.pop(index, bytearray())
            fits = self.job.keeps_data and len(data) <= min(max_bytes, MAX_KEPT_BYTES)
            if data and not fits:
                facts = {**conversion.job_fields(self.job), "image": index, "bytes": len(data)}
                _log.warning("the data to keep for an image is too large; it is dropped", extra=facts)
            found.append(bytes(data) if fits else b"")
            max_bytes -= len(found[-1])
        return found

    def encoded_images(self) -> list[bytes]:
        """Return all encoded images. Raises WorkerLost if some are missing."""
        if sorted(self.images) != list(range(self.job.num_images)):
            raise WorkerLost("the worker did not send every image")
        return [bytes(self.images[index]) for index in range(self.job.num_images)]


class WorkerConnection:
    """The gateway's connection to one worker, with the attempts that the worker runs.

    Args:
        calls: Runs the calls to the worker in the background.
        on_checkpoint: Called with the worker and each checkpoint of its attempts.

    Attributes:
        attempts: The worker's attempts, by job ID.
        revision: A counter that rises when the attempts or their steps change.
    """

    def __init__(
        self,
        member: Member,
        client: WorkerClient,
        calls: BackgroundTasks,
        on_checkpoint: Callable[[Member, worker_pb2.WatchCheckpointsResponse], None],
    ) -> None:
        self.member = member
        self.client = client
        self.attempts: dict[str, DispatchedAttempt] = {}
        self.revision = 0
        self._calls = calls
        self._on_checkpoint = on_checkpoint
        self._stale = 0
        self._checkpoints = calls.start(self._watch_checkpoints())

    @property
    def jobs(self) -> list[Job]:
        """The jobs that run on the worker, in the order in which they were sent."""
        return [attempt.job for attempt in self.attempts.values()]

    def add(self, attempt: DispatchedAttempt) -> None:
        """Add an attempt that is sent to the worker."""
        self.attempts[attempt.job.job_id] = attempt
        self.revision += 1

    def remove(self, attempt: DispatchedAttempt) -> None:
        """Remove an attempt that has ended."""
        del self.attempts[attempt.job.job_id]
        self.revision += 1

    def watch_checkpoints(self) -> None:
        """Restart the stream of checkpoints. The worker then sends the newest checkpoint of every attempt again."""
        self._checkpoints.cancel()
        self._checkpoints = self._calls.start(self._watch_checkpoints())

    async def list_attempts(self) -> Sequence[worker_pb2.AttemptSummary]:
        """List the worker's attempts, also those from before a restart of the gateway. Raises BottegaError."""
        return await self.client.list_attempts(deadline_s=_LIST_DEADLINE_S)

    def stop_attempt(self, attempt: worker_pb2.AttemptId) -> None:
        """Tell the worker to stop an attempt whose result is no longer needed."""
        self._calls.start(self._stop_attempt(attempt))

    def stop_stale_attempt(self, attempt: worker_pb2.AttemptId) -> None:
        """Tell the worker to stop an outdated attempt that it reported. At most MAX_STALE calls run at once."""
        if self._stale < MAX_STALE:
            self._stale += 1
            self._calls.start(self._stop_stale_attempt(attempt))

    def enable_previews(self, attempt: DispatchedAttempt) -> None:
        """Tell the worker to send previews of an attempt."""
        self._calls.start(self._enable_previews(attempt))

    def close(self) -> None:
        """End every call to the worker."""
        self._checkpoints.cancel()
        self._calls.start(self.client.close())

    async def _watch_checkpoints(self) -> None:
        name = self.member.name
        while True:
            try:
                async for news in self.client.checkpoints():
                    self._on_checkpoint(self.member, news)
            except BottegaError as error:
                _log.debug("checkpoints cannot be watched now; retrying", extra={"member": name, "text": error.message})
            except Exception:  # noqa: BLE001 - the boundary of the task: without it a dead worker's jobs start from zero
                _log.exception("the stream of checkpoints failed; it is opened again", extra={"member": name})
            await asyncio.sleep(_WATCH_PAUSE_S)

    async def _stop_attempt(self, attempt: worker_pb2.AttemptId) -> None:
        try:
            await self.client.cancel_attempt(attempt, deadline_s=_CANCEL_DEADLINE_S)
        except BottegaError as error:
            # The worker gives the attempt up by itself once its deadline or grace is over.
            _log.info("an attempt could not be cancelled", extra={"job_id": attempt.job_id, "text": error.message})

    async def _stop_stale_attempt(self, attempt: worker_pb2.AttemptId) -> None:
        try:
            await self._stop_attempt(attempt)
        finally:
            self._stale -= 1

    async def _enable_previews(self, attempt: DispatchedAttempt) -> None:
        try:
            await self.client.preview_attempt(attempt.id, deadline_s=_PREVIEW_DEADLINE_S)
        except BottegaError as error:
            # The attempt goes on without previews. If it is lost, the next attempt has them.
            _log.warning(
                "previews could not be requested; the attempt goes on without them",
                extra={**conversion.job_fields(attempt.job), "text": error.message},
            )


class WorkerClient:
    """The client of one worker, which connects and reconnects by itself. Every failure is a BottegaError.

    WorkerLost means that the connection broke, as when the worker dies (see is_death), or that the worker gave up the
    attempt. Other Unavailable errors and QueueFull mean that the worker did not accept the attempt.

    Args:
        generation: Returns the generation of the scheduler's lease, 0 if the jobs are not shared. A worker refuses
            calls of an older one than it knows.
    """

    def __init__(self, target: Target, channels: Channels, generation: Callable[[], int] = lambda: 0) -> None:
        self._channel = channels.open(target)
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
