"""The attempts that a worker holds: states, events for followers, newest checkpoints, and the time of removal.

    state      event                                            next state
    accepted   the engine begins                                running
    running    all images are encoded                           completed
    live       CancelAttempt, or a higher number of the job     dropped, in the engine too
               the engine dies or hangs                         failed: WORKER_LOST, with the attempts lost beside it
               the deadline passes                              failed: DEADLINE_PASSED
    ended      RunAttempt of the same number                    its events are sent again, while it is kept
               anything else                                    unchanged

An attempt is identified by job ID and number; a higher number of the same job replaces lower ones. A follower is a call
that receives the events of an attempt. Followers may come and go: each gets the current state first and then the
changes. Only the newest progress is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from bottega.errors import BottegaError, QueueFull, StaleAttempt
from bottega.v1.generation_pb2 import Provenance
from bottega.v1.trace_pb2 import Trace
from bottega.v1.worker_pb2 import AttemptDecisions, AttemptId

_RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptKey:
    """The identity of an attempt: job ID and number."""

    job_id: str
    number: int
    """Number of the attempt at its job, counted from 1."""

    @classmethod
    def of(cls, attempt: AttemptId) -> AttemptKey:
        """Return the key of the attempt that a message identifies."""
        return cls(job_id=attempt.job_id, number=attempt.number)

    def message(self) -> AttemptId:
        """Convert the key to a message."""
        return AttemptId(job_id=self.job_id, number=self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEvent:
    """The event that denoising has started. Step counts are sums over all images."""

    steps_total: int
    steps_resumed: int
    """Number of steps that are skipped thanks to a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """The event that denoising has advanced."""

    steps_done: int
    """Number of completed steps, summed over all images."""
    device_s: float = 0.0
    """Seconds for which the attempt has used the device so far."""
    preview_index: int = 0
    preview_jpeg: bytes = b""
    """The preview of image `preview_index`; b"" if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureEvent:
    """The event that an image is finished."""

    index: int
    """Index of the image in the job."""
    data: bytes
    """The encoded image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEvent:
    """The event that add-ons keep data, such as latents, of a finished image for later edits."""

    index: int
    """Index of the image in the job."""
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedEvent:
    """The last event of an attempt that completed, after all its images."""

    provenance: Provenance
    trace: Trace = field(default_factory=Trace)
    """Spans since the attempt was accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent:
    """The last event of an attempt that failed."""

    error: BottegaError
    trace: Trace = field(default_factory=Trace)
    """Spans since the attempt was accepted."""


Event = StartedEvent | AttemptDecisions | ProgressEvent | PictureEvent | KeptEvent | CompletedEvent | FailedEvent


class AttemptState(Enum):
    """The state of an attempt at a job."""

    ACCEPTED = "accepted"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class Attempt:
    """An attempt at a job: its state, its results, and the events for its followers.

    Methods that change an attempt do nothing once it has ended, so late events are harmless.
    """

    def __init__(self, key: AttemptKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.state = AttemptState.ACCEPTED
        self.started: StartedEvent | None = None
        self.decisions: AttemptDecisions | None = None
        self.progress: ProgressEvent | None = None
        self.pictures: list[PictureEvent] = []
        self.kept: list[KeptEvent] = []
        self.outcome: CompletedEvent | FailedEvent | None = None
        self.ended_s = 0.0
        self.fetched = False
        self._clock = clock
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether the attempt is completed or failed."""
        return self.outcome is not None

    @property
    def steps_done(self) -> int:
        """Number of completed denoising steps, summed over all images."""
        return self.progress.steps_done if self.progress else 0

    @property
    def size_bytes(self) -> int:
        """Total bytes of its encoded images and of the data that is kept of them."""
        pictures = sum(len(picture.data) for picture in self.pictures)
        return pictures + sum(len(kept.data) for kept in self.kept)

    def start(self, started: StartedEvent) -> None:
        """Note that the engine has started denoising."""
        if self.state is AttemptState.ACCEPTED:
            self.state = AttemptState.RUNNING
            self.started = started
            self._notify()

    def set_decisions(self, decisions: AttemptDecisions) -> None:
        """Set all decisions that the attempt has made until now."""
        if not self.ended:
            self.decisions = decisions
            self._notify()

    def advance(self, progress: ProgressEvent) -> None:
        """Set the progress to send next. Progress that was not sent yet is dropped."""
        if not self.ended and progress.steps_done >= self.steps_done:
            self.progress = progress
            self._notify()

    def add_picture(self, picture: PictureEvent) -> None:
        """Add a finished image."""
        if not self.ended:
            self.pictures.append(picture)
            self._notify()

    def add_kept(self, kept: KeptEvent) -> None:
        """Add the data that add-ons keep of an image."""
        if not self.ended:
            self.kept.append(kept)
            self._notify()

    def complete(self, provenance: Provenance, trace: Trace) -> None:
        """End the attempt successfully. All its images have been added."""
        self._end(AttemptState.COMPLETED, CompletedEvent(provenance=provenance, trace=trace))

    def fail(self, error: BottegaError, trace: Trace) -> None:
        """End the attempt with an error."""
        if not self.ended:
            self.pictures.clear()
            self.kept.clear()
        self._end(AttemptState.FAILED, FailedEvent(error=error, trace=trace))

    async def follow(self) -> AsyncIterator[Event]:
        """Yield the attempt's events from the current state on, until it has ended.

        A follower that stops early changes nothing.
        """
        cursor = _EventCursor(self)
        while True:
            changed = self._changed
            for event in cursor.pending():
                yield event
            if changed.is_set():
                continue  # more events came while these were sent
            if self.ended:
                self.fetched = True
                return
            await changed.wait()  # each attempt ends at some time, because a dead engine is noticed

    def _end(self, state: AttemptState, outcome: CompletedEvent | FailedEvent) -> None:
        if not self.ended:
            self.state, self.outcome, self.ended_s = state, outcome, self._clock()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _EventCursor:
    """The position of one follower in the events of an attempt."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._started = False
        self._decisions: AttemptDecisions | None = None
        self._progress: ProgressEvent | None = None
        self._pictures = self._kept = 0
        self._outcome = False

    def pending(self) -> Iterator[Event]:
        """Yield the events that the follower has not received yet."""
        attempt = self._attempt
        if self._outcome:
            return  # the last event was sent already
        if attempt.started and not self._started:
            self._started = True
            yield attempt.started
        if attempt.decisions is not None and attempt.decisions is not self._decisions:
            self._decisions = attempt.decisions
            yield attempt.decisions
        if attempt.progress is not None and attempt.progress is not self._progress:
            self._progress = attempt.progress
            yield attempt.progress
        while (part := self._next_part()) is not None:
            yield part
        if attempt.outcome and not self._outcome:
            self._outcome = True
            yield attempt.outcome

    def _next_part(self) -> PictureEvent | KeptEvent | None:
        """Return the next image or kept data, or None. More of either may be added while one is sent."""
        attempt = self._attempt
        if self._pictures < len(attempt.pictures):
            self._pictures += 1
            return attempt.pictures[self._pictures - 1]
        if self._kept < len(attempt.kept):
            self._kept += 1
            return attempt.kept[self._kept - 1]
        return None


class Attempts:
    """The attempts that a worker holds: one for each job, at most `max_attempts` of which have not ended.

    Args:
        result_grace_s: Seconds for which ended attempts are kept.
        result_bytes: Upper bound on the total bytes of ended attempts that are kept.
    """

    def __init__(
        self,
        *,
        max_attempts: int,
        result_grace_s: float,
        result_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_attempts = max_attempts
        self._result_grace_s = result_grace_s
        self._result_bytes = result_bytes
        self._clock = clock
        self._by_job: dict[str, Attempt] = {}

    def find(self, key: AttemptKey) -> Attempt | None:
        """Return the attempt with this key if the worker holds it, else None."""
        attempt = self._by_job.get(key.job_id)
        return attempt if attempt is not None and attempt.key == key else None

    def superseded(self, key: AttemptKey) -> Attempt | None:
        """Return the earlier attempt at the same job that this one replaces, or None.

        Raises:
            StaleAttempt: The worker holds a later attempt.
        """
        attempt = self._by_job.get(key.job_id)
        if attempt is not None and attempt.key.number > key.number:
            raise StaleAttempt(f"attempt {key.number} is superseded by attempt {attempt.key.number}")
        return attempt if attempt is not None and attempt.key != key else None

    def add(self, key: AttemptKey) -> Attempt:
        """Add a new attempt in place of an earlier one at its job. Raises QueueFull if too many have not ended."""
        if sum(1 for _ in self.active()) >= self._max_attempts:
            raise QueueFull("the worker is full: it runs the maximum number of attempts", retry_after_s=_RETRY_AFTER_S)
        attempt = self._by_job[key.job_id] = Attempt(key, self._clock)
        return attempt

    def forget(self, attempt: Attempt) -> None:
        """Remove an attempt."""
        if self._by_job.get(attempt.key.job_id) is attempt:
            del self._by_job[attempt.key.job_id]

    def sweep(self) -> None:
        """Remove attempts that ended longer ago than the grace period, and more until the others fit in `result_bytes`.

        Attempts whose results were fetched are removed first, then the oldest.
        """
        now_s = self._clock()
        for attempt in [a for a in self if a.ended and now_s - a.ended_s > self._result_grace_s]:
            self.forget(attempt)
        ended = sorted((a for a in self if a.ended), key=lambda a: (not a.fetched, a.ended_s))
        excess = sum(attempt.size_bytes for attempt in ended) - self._result_bytes
        for attempt in ended:
            if excess <= 0:
                return
            excess -= attempt.size_bytes
            self.forget(attempt)

    def active(self) -> Iterator[Attempt]:
        """Return the attempts that have not ended, oldest first."""
        return (attempt for attempt in self if not attempt.ended)

    def __iter__(self) -> Iterator[Attempt]:
        """Iterate over all attempts, oldest first."""
        return iter(self._by_job.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCheckpoint:
    """A saved state from which an attempt can be resumed."""

    key: AttemptKey
    steps_done: int
    """Number of completed steps, summed over all images."""
    data: bytes
    """The checkpoint as the engine serialized it. The front process does not parse it."""


class CheckpointWatch:
    """The newest checkpoint of each running attempt. It replaces older ones that were not sent in time."""

    def __init__(self) -> None:
        self._newest: dict[AttemptKey, AttemptCheckpoint] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, checkpoint: AttemptCheckpoint) -> None:
        """Set the newest checkpoint of an attempt."""
        self._newest[checkpoint.key] = checkpoint
        self._notify()

    def drop(self, key: AttemptKey) -> None:
        """Drop the checkpoint of an attempt that has ended."""
        self._newest.pop(key, None)

    def close(self) -> None:
        """End every `watch`."""
        self._closed = True
        self._notify()

    async def watch(self) -> AsyncIterator[AttemptCheckpoint]:
        """Yield the current checkpoint of every attempt, then each newer one, until `close`."""
        sent: dict[AttemptKey, AttemptCheckpoint] = {}
        while not self._closed:
            changed = self._changed
            sent = {key: checkpoint for key, checkpoint in sent.items() if key in self._newest}
            unsent = [checkpoint for key, checkpoint in self._newest.items() if sent.get(key) is not checkpoint]
            for checkpoint in unsent[:1]:  # only one, because newer ones may come while it is sent
                sent[checkpoint.key] = checkpoint
                yield checkpoint
            if not unsent:
                await changed.wait()  # until `close`, or until the caller ends the stream

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
