"""The connection to one worker: the attempts that it was given, its checkpoints, and small calls to it.

No outcome of a job depends on the small calls: one that fails is logged, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bottega.addons.interface.gateway_addon import Release
from bottega.addons.interface.views import Member
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, InternalError, TooLarge, WorkerLost
from bottega.gateway.dispatch.worker_client import WorkerClient
from bottega.gateway.jobs import conversion
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import StoredImage
from bottega.rules import MAX_KEPT_BYTES
from bottega.v1 import worker_pb2
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

_log = logging.getLogger(__name__)


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


class AttemptObserver(Protocol):
    """Receives the progress and the end of each attempt. Its methods run in the event loop and must not block."""

    def attempt_sent(self, job: Job) -> None:
        """Note that the attempt is being sent to a worker now."""

    def attempt_advanced(self, job: Job) -> None:
        """Note that the attempt has finished denoising steps."""

    def attempt_saved(self, job: Job) -> None:
        """Note that the job has a newer checkpoint."""

    def attempt_decided(self, job: Job) -> None:
        """Note that the attempt has made a decision that later attempts at the job must follow."""

    def attempt_lost(self, job: Job, number: int, error: BottegaError) -> None:
        """Note that the worker died or disconnected. The job may have caused that."""

    def attempt_returned(self, job: Job, number: int, error: BottegaError) -> None:
        """Note that the worker refused the attempt, or returned it because it is stopping. The job is not the cause."""

    def attempt_failed(self, job: Job, number: int, error: BottegaError) -> None:
        """Note that the worker reported that the job cannot be drawn."""

    def attempt_over(self, job: Job, device_s: float | None) -> None:
        """Note that an attempt ended, with or without success.

        Args:
            job: The job.
            device_s: Seconds for which the attempt used the worker's device; None if unknown.
        """

    def attempt_completed(
        self, job: Job, number: int, pictures: tuple[StoredImage, ...], provenance: Provenance
    ) -> None:
        """Note that all images of an attempt are stored."""


class WorkerConnection:
    """The gateway's connection to one worker, with the attempts that the worker runs.

    Args:
        calls: Runs the calls to the worker in the background.
        on_checkpoint: Called with the worker and each checkpoint of its attempts.

    Attributes:
        attempts: The worker's attempts, by job ID.
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
        self.member.revision += 1

    def remove(self, attempt: DispatchedAttempt) -> None:
        """Remove an attempt that has ended."""
        del self.attempts[attempt.job.job_id]
        self.member.revision += 1

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
