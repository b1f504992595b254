"""The attempts that a worker holds: what state each is in, what its followers are told, how long it is kept.

    state      what happens                                     next
    accepted   the engine begins                                running
    running    images are encoded                               completed
    live       CancelAttempt, or a higher number of the job     dropped, in the engine too
               its engine dies or hangs                         failed: WORKER_LOST, with what died beside it
               its deadline passes                              failed: DEADLINE_PASSED
    ended      RunAttempt of the same number                    told again, until the grace is over or room is needed
               anything else                                    unchanged

An attempt is told apart by job and number; a higher number of a job supersedes the lower ones. Followers may come and
go: each is told the current state first and then what changes, of the progress only the newest.
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
    """Names one attempt at one job; number counts from 1."""

    job_id: str
    number: int

    @classmethod
    def of(cls, attempt: AttemptId) -> AttemptKey:
        """The key of the attempt that a message names."""
        return cls(job_id=attempt.job_id, number=attempt.number)

    def message(self) -> AttemptId:
        """The name as messages carry it."""
        return AttemptId(job_id=self.job_id, number=self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEvent:
    """Denoising has begun. Steps are over all images; steps_resumed is what a checkpoint brought."""

    steps_total: int
    steps_resumed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressEvent:
    """Denoising goes on."""

    steps_done: int
    """Number of steps over all images."""
    device_s: float = 0.0
    """Seconds of the device that the attempt has used."""
    preview_index: int = 0
    preview_jpeg: bytes = b""
    """Empty without a preview."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureEvent:
    """A finished image, encoded; index is its place in the job."""

    index: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptEvent:
    """What is kept of an image for edits of it; index is its place in the job."""

    index: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletedEvent:
    """All pictures are there. trace: what took how long, since the attempt began."""

    provenance: Provenance
    trace: Trace = field(default_factory=Trace)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedEvent:
    """There will be no picture. trace: see CompletedEvent."""

    error: BottegaError
    trace: Trace = field(default_factory=Trace)


Event = StartedEvent | AttemptDecisions | ProgressEvent | PictureEvent | KeptEvent | CompletedEvent | FailedEvent


class AttemptState(Enum):
    ACCEPTED = "accepted"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class Attempt:
    """One attempt: what is known of it, and who follows it.

    Every method that changes it is harmless once it has ended: an answer that comes late changes nothing.
    """

    def __init__(self, key: AttemptKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.state = AttemptState.ACCEPTED
        self.started: StartedEvent | None = None
        self.decisions: AttemptDecisions | None = None
        self.progress: ProgressEvent | None = None
        self.pictures: list[PictureEvent] = []
        self.latents: list[KeptEvent] = []
        self.outcome: CompletedEvent | FailedEvent | None = None
        self.ended_s = 0.0
        self.fetched = False
        self._clock = clock
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether it is completed or failed."""
        return self.outcome is not None

    @property
    def steps_done(self) -> int:
        """Denoising steps done, over all images."""
        return self.progress.steps_done if self.progress else 0

    @property
    def size_bytes(self) -> int:
        """Of its pictures, and of what is kept of them."""
        pictures = sum(len(picture.data) for picture in self.pictures)
        return pictures + sum(len(latents.data) for latents in self.latents)

    def start(self, started: StartedEvent) -> None:
        """The engine has begun."""
        if self.state is AttemptState.ACCEPTED:
            self.state = AttemptState.RUNNING
            self.started = started
            self._notify()

    def set_decisions(self, decisions: AttemptDecisions) -> None:
        """All that it has decided by now, with what it was given."""
        if not self.ended:
            self.decisions = decisions
            self._notify()

    def advance(self, progress: ProgressEvent) -> None:
        """Replaces the progress that followers have not been told of. One that is older is dropped."""
        if not self.ended and progress.steps_done >= self.steps_done:
            self.progress = progress
            self._notify()

    def add_picture(self, picture: PictureEvent) -> None:
        """A picture is ready."""
        if not self.ended:
            self.pictures.append(picture)
            self._notify()

    def add_kept(self, latents: KeptEvent) -> None:
        """What is kept of a picture is ready."""
        if not self.ended:
            self.latents.append(latents)
            self._notify()

    def complete(self, provenance: Provenance, trace: Trace) -> None:
        """All its pictures have been added."""
        self._end(AttemptState.COMPLETED, CompletedEvent(provenance=provenance, trace=trace))

    def fail(self, error: BottegaError, trace: Trace) -> None:
        """It ends without pictures."""
        if not self.ended:
            self.pictures.clear()
            self.latents.clear()
        self._end(AttemptState.FAILED, FailedEvent(error=error, trace=trace))

    async def follow(self) -> AsyncIterator[Event]:
        """Its events from the current state on, until it has ended. Breaking off changes nothing."""
        cursor = _EventCursor(self)
        while True:
            changed = self._changed
            for event in cursor.pending():
                yield event
            if changed.is_set():
                continue  # while events were sent, more came
            if self.ended:
                self.fetched = True
                return
            await changed.wait()  # ends: the engine is watched, and an attempt ends with it

    def _end(self, state: AttemptState, outcome: CompletedEvent | FailedEvent) -> None:
        if not self.ended:
            self.state, self.outcome, self.ended_s = state, outcome, self._clock()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class _EventCursor:
    """What one follower has been told."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._started = False
        self._decisions: AttemptDecisions | None = None
        self._progress: ProgressEvent | None = None
        self._pictures = self._latents = 0
        self._outcome = False

    def pending(self) -> Iterator[Event]:
        """What it has not been told."""
        attempt = self._attempt
        if self._outcome:
            return  # it came while older news was sent: nothing follows the end
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
        """What comes before the outcome: while one part is sent others come, of either kind."""
        attempt = self._attempt
        if self._pictures < len(attempt.pictures):
            self._pictures += 1
            return attempt.pictures[self._pictures - 1]
        if self._latents < len(attempt.latents):
            self._latents += 1
            return attempt.latents[self._latents - 1]
        return None


class Attempts:
    """All attempts that are held, at most one a job and `max_attempts` that have not ended.

    result_grace_s, result_bytes: for how long, and how much, what has ended is kept.
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
        """The attempt, when it is held."""
        attempt = self._by_job.get(key.job_id)
        return attempt if attempt is not None and attempt.key == key else None

    def superseded(self, key: AttemptKey) -> Attempt | None:
        """The earlier attempt of the job, which this one supersedes. Raises StaleAttempt when a later one is held."""
        attempt = self._by_job.get(key.job_id)
        if attempt is not None and attempt.key.number > key.number:
            raise StaleAttempt(f"attempt {key.number} is superseded by attempt {attempt.key.number}")
        return attempt if attempt is not None and attempt.key != key else None

    def add(self, key: AttemptKey) -> Attempt:
        """Holds a new attempt, in place of an earlier one of its job. Raises QueueFull when it holds too many."""
        if sum(1 for _ in self.active()) >= self._max_attempts:
            raise QueueFull("the worker holds as many attempts as it may", retry_after_s=_RETRY_AFTER_S)
        attempt = self._by_job[key.job_id] = Attempt(key, self._clock)
        return attempt

    def forget(self, attempt: Attempt) -> None:
        """Holds it no longer."""
        if self._by_job.get(attempt.key.job_id) is attempt:
            del self._by_job[attempt.key.job_id]

    def sweep(self) -> None:
        """Forgets what ended longer ago than the grace; beyond the bytes, what was fetched first, then the oldest."""
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
        """Those that have not ended, oldest first."""
        return (attempt for attempt in self if not attempt.ended)

    def __iter__(self) -> Iterator[Attempt]:
        """All, oldest first."""
        return iter(self._by_job.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCheckpoint:
    """Where an attempt can be resumed: steps_done over all images, and the engine's own bytes."""

    key: AttemptKey
    steps_done: int
    data: bytes


class CheckpointWatch:
    """Keeps one checkpoint for every attempt that runs."""

    def __init__(self) -> None:
        self._newest: dict[AttemptKey, AttemptCheckpoint] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, checkpoint: AttemptCheckpoint) -> None:
        """Replaces the attempt's checkpoint."""
        self._newest[checkpoint.key] = checkpoint
        self._tell()

    def drop(self, key: AttemptKey) -> None:
        """The attempt has ended: its checkpoint is of no use."""
        self._newest.pop(key, None)

    def close(self) -> None:
        """Ends every `watch`."""
        self._closed = True
        self._tell()

    async def watch(self) -> AsyncIterator[AttemptCheckpoint]:
        """Every attempt's checkpoint as it stands, then every newer one, until closed."""
        sent: dict[AttemptKey, AttemptCheckpoint] = {}
        while not self._closed:
            changed = self._changed
            sent = {key: checkpoint for key, checkpoint in sent.items() if key in self._newest}
            unsent = [checkpoint for key, checkpoint in self._newest.items() if sent.get(key) is not checkpoint]
            for checkpoint in unsent[:1]:  # one, then look again: it takes time, and newer ones may have come
                sent[checkpoint.key] = checkpoint
                yield checkpoint
            if not unsent:
                await changed.wait()  # ends with `close`, or when the caller hangs up

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
