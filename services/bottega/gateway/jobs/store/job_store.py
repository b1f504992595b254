"""What the gateway asks of a job store. Another backend is one when the conformance tests say so. Knows no backend."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from bottega.gateway.jobs.store.record import EndTime, JobRecord, StoredPicture
from bottega.v1.image_pb2 import JobState


class JobStore(Protocol):
    """Jobs that outlive the gateway.

    - What a method has acknowledged by returning is durable, and every later read, by any store of the same jobs,
      sees it.
    - A job ends once: of any number of calls that would end it, from any number of stores, one returns True.
    - A method that changes a job returns whether it did: False for an attempt that does not count, a job that has
      ended, and one that is not known.
    - Every method may raise StorageUnavailable, of a disk that is full or cannot be used: then nothing was
      acknowledged, though it may have happened, and it may be tried again. Reads go on where they can.
    - Every method may raise DataLoss, of damage, and then gives no answer. Once the whole was seen to be damaged,
      nothing is written; a job that is found is still good, one that is not is DataLoss, as every list is.
    - While the whole is sound, a single job that is damaged stands in the way of no other: lists leave it out, the log
      tells of it, and it is left as it is. Whoever asks for that one hears DataLoss.
    - A cancelled call may have happened. Whoever must know awaits it to its end (asyncio.shield).
    """

    @property
    def generation(self) -> int:
        """Number of this life of the gateway: larger than that of every earlier one. 0 before open."""
        ...

    async def open(self) -> None:
        """Creates the store or checks it. Raises DataLoss naming what is damaged and what to do, ConfigError for the
        store of a later version or of something else.

        After StorageUnavailable and DataLoss reads work as far as they can. It may be called again, until it succeeds.
        """
        ...

    async def open_to_read(self) -> None:
        """Reads work from now on, as far as they can, and nothing is written; `open` may follow.

        Raises as `open` does. Harmless where there is no store yet, which stays so.
        """
        ...

    async def close(self) -> None:
        """Ends after what was begun."""
        ...

    async def add(self, record: JobRecord, *, inputs: bytes = b"", replaces: str = "") -> JobRecord:
        """Takes a queued job; returns it with its sequence.

        When its job_id or its request_id is known and not forgotten, nothing is taken, and the known job is returned:
        compare its job_id, and its fingerprint.
        inputs: what it needs beside its spec while it is live: its complete GenerationSpec where it has input images.
        replaces: job_id of a failed job that this one, a retry, takes the request_id from; or of a completed one
        whose images have gone.
        """
        ...

    async def begin(self, job_id: str, attempt: int, *, started_wall: float) -> bool:
        """A worker takes the job. The first started_wall stays.

        `attempt` must be larger than every earlier one's, or the newest one's again where that was lost.
        """
        ...

    async def requeue(self, job_id: str, attempt: int, *, deaths: int) -> bool:
        """The attempt is lost: the job waits again, with so many deaths."""
        ...

    async def dress(self, job_id: str, attempt: int, *, loras_step: int) -> bool:
        """The attempt puts its LoRAs in at that step."""
        ...

    async def extend(self, job_id: str, deadline_wall: float | None) -> bool:
        """The job is given until then; None is without bound."""
        ...

    async def complete(
        self,
        job_id: str,
        attempt: int,
        *,
        pictures: tuple[StoredPicture, ...],
        provenance: bytes,
        ended_wall: float,
        ended_steady: float | None = None,
    ) -> bool:
        """The attempt brought all images, which are durable already. The inputs go.

        ended_steady: the same moment on the clock of `forget`; None where that says the same.
        """
        ...

    async def fail(
        self,
        job_id: str,
        attempt: int | None,
        *,
        error: bytes,
        state: JobState.ValueType,
        ended_wall: float,
        ended_steady: float | None = None,
        spec: bytes | None = None,
    ) -> bool:
        """The job failed or was cancelled; with an attempt, only if that one counts. The inputs go.

        ended_steady: as in `complete`. spec: what is kept of its spec from now on; None is all.
        """
        ...

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None."""
        ...

    async def of_request(self, request_id: str) -> JobRecord | None:
        """The newest job of an idempotency key, or None."""
        ...

    async def inputs(self, job_id: str) -> bytes:
        """What was given with a live job; empty when that was nothing, or it has ended."""
        ...

    async def last_end(self) -> EndTime | None:
        """When the job ended that ended last by the clock of `forget`: an earlier process was there then. Or None."""
        ...

    async def live(self) -> list[JobRecord]:
        """All jobs that have not ended, oldest first."""
        ...

    async def page(
        self,
        *,
        size: int,
        states: Collection[JobState.ValueType] = (),
        created_after: float | None = None,
        created_before: float | None = None,
        before_sequence: int | None = None,
    ) -> list[JobRecord]:
        """Up to `size` jobs, newest first: in any of the states (empty is all), accepted at or after and before these
        times, and older than that sequence."""
        ...

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        """Forgets up to `limit` jobs and returns how many; call again while that is `limit`.

        Forgotten are jobs that ended before that time, those that ended first before others; and as many more ended
        ones as it takes until at most max_jobs are remembered, live ones included, with specs and results of at most
        max_bytes. Of these cancelled and failed ones go first, and completed ones when there are no others; always the
        oldest end of the peer that has the most of the kind, in number while there are too many, else in bytes (of two
        peers with as much the first by name). So whoever makes many forgets its own.
        """
        ...

    async def probe(self) -> None:
        """Writes what is there already: returns when something could be written."""
        ...
