"""The two interfaces of the dispatcher: the client of a worker, and the observer of attempts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from bottega.errors import BottegaError, WorkerLost
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.values import StoredImage
from bottega.v1 import worker_pb2
from bottega.v1.generation_pb2 import Provenance

AttemptEvents = AsyncGenerator[worker_pb2.RunAttemptResponse, None]


def is_death(error: BottegaError) -> bool:
    """Whether an attempt ended with its worker's death, or its engine's: then it may have been the job's doing."""
    return isinstance(error, WorkerLost) and "died" in error.metadata


def died_alone(error: BottegaError) -> bool:
    """Whether nothing else is known to have died with the attempt."""
    return error.metadata.get("held_together", "1") == "1"


class WorkerClient(Protocol):
    """Calls to one worker. Every failure is a BottegaError.

    WorkerLost is a connection that broke, as at the worker's death (see is_death), or an attempt that it gave up;
    another Unavailable, or QueueFull, a worker that did not take the attempt.
    """

    def run_attempt(self, request: worker_pb2.RunAttemptRequest) -> AttemptEvents:
        """Starts an attempt before it returns, and streams its events."""

    def checkpoints(self) -> AsyncGenerator[worker_pb2.WatchCheckpointsResponse, None]:
        """Streams the newest checkpoint of every attempt."""

    async def cancel_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        """Stops an attempt and forgets it."""

    async def list_attempts(self, *, deadline_s: float) -> Sequence[worker_pb2.AttemptSummary]:
        """What it runs, and what is finished and was not forgotten yet."""

    async def preview_attempt(self, attempt: worker_pb2.AttemptId, *, deadline_s: float) -> None:
        """Asks for previews of an attempt from now on."""

    async def close(self) -> None:
        """Ends every call."""


class AttemptObserver(Protocol):
    """Who is told how attempts end. Called in the event loop; must not block."""

    def attempt_sent(self, job: Job) -> None:
        """The worker is called now."""

    def attempt_advanced(self, job: Job) -> None:
        """Denoising went on."""

    def attempt_decided(self, job: Job) -> None:
        """It has decided something that later attempts keep to."""

    def attempt_lost(self, job: Job, number: int, error: BottegaError) -> None:
        """The worker, or the way to it, is lost; the job is not, though it may have been its doing."""

    def attempt_returned(self, job: Job, number: int, error: BottegaError) -> None:
        """The worker did not take the attempt, or stops and gives it back: not the job's doing."""

    def attempt_failed(self, job: Job, number: int, error: BottegaError) -> None:
        """The worker says that the job cannot be drawn."""

    def attempt_completed(
        self, job: Job, number: int, pictures: tuple[StoredImage, ...], provenance: Provenance
    ) -> None:
        """All images are on the disk."""
