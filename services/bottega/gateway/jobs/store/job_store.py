"""The interface of a job store, and what each implementation promises; the conformance tests check it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from bottega.gateway.jobs.store.record import ALL_JOBS, Change, EndTime, JobFilter, JobRecord, TenantUsage


class JobStore(Protocol):
    """Jobs that outlive the gateway.

    - What a method has acknowledged by returning is durable, and every later read, by any store of the same jobs,
      sees it.
    - A job ends once: of any number of changes that would end it, from any number of stores, one takes effect.
    - Every method may raise StorageUnavailable, of a disk that is full or cannot be used: then nothing was
      acknowledged, though it may have happened, and it may be tried again. Reads go on where they can.
    - Every method may raise DataLoss, of damage, and then gives no answer. Once the whole was seen to be damaged,
      nothing is written; a job that is found is still good, one that is not is DataLoss, as every list is.
    - While the whole is sound, a single job that is damaged stands in the way of no other: lists leave it out, the log
      names it, and it is left as it is. Reading that one raises DataLoss.
    - A cancelled call may have happened. A caller that must know awaits it to its end (asyncio.shield).
    """

    @property
    def generation(self) -> int:
        """Number of this life of the gateway: larger than that of every earlier one. 0 before open."""

    async def open(self) -> None:
        """Creates the store or checks it. Raises DataLoss naming what is damaged and what to do, ConfigError for the
        store of another version or of something else.

        After StorageUnavailable and DataLoss reads work as far as they can. It may be called again, until it succeeds.
        """

    async def open_to_read(self) -> None:
        """Reads work from now on, as far as they can, and nothing is written; `open` may follow.

        Raises as `open` does. Harmless where there is no store yet, which stays so.
        """

    async def close(self) -> None:
        """Ends after what was begun."""

    @property
    def lost(self) -> bool:
        """Whether what was stored is gone under the open store: every method raises StorageUnavailable until
        `remake` has succeeded.
        """

    async def remake(self, live: AsyncIterator[tuple[JobRecord, bytes]]) -> None:
        """Make a store that is lost anew, with these jobs that have not ended and their inputs; harmless otherwise.

        It may be called again after it failed.
        """

    async def add(self, record: JobRecord, *, inputs: bytes = b"", replaces: str = "") -> JobRecord:
        """Adds a job, queued or already completed; returns it with its sequence.

        When its job_id, or its tenant's request_id, is known and not forgotten, nothing is added, and the known job
        is returned: compare its job_id, and its fingerprint.
        inputs: what it needs beside its spec while it is live: its complete GenerationSpec where it has input images.
        replaces: job_id of a failed job that this one, a retry, takes the request_id from; or of a completed one
        whose images have gone.
        """

    async def update(self, job_id: str, change: Change) -> bool:
        """Writes what `change` makes of the job; whether it changed it: False for an unknown job. The inputs of a job
        that ends go.
        """

    async def delete(self, job_id: str, *, tenant: str = "", steady: float) -> list[str] | None:
        """Forget a tenant's job that has ended, with its request_id.

        A repeated call gives the same answer as long as deletions are remembered: the newest 10,000, until `forget`
        is called with an `ended_before` later than `steady`.

        Args:
            job_id: ID of the job.
            tenant: The tenant that the job must belong to.
            steady: The time of the call on the steady clock.

        Returns:
            Digests of its pictures, and of what was kept of them, that no other job of its tenant has. None if there is
            and was no such job, or if it has not ended.
        """

    async def was_deleted(self, job_id: str, *, tenant: str = "") -> bool:
        """Return whether a job of that tenant was deleted and its deletion is still remembered."""

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
        """The job, or None. tenant: whose it has to be; None is anybody. Another tenant's job takes as
        long as none.
        """

    async def of_request(self, request_id: str, *, tenant: str = "") -> JobRecord | None:
        """The newest job of an idempotency key of that tenant, or None."""

    async def usage(self, tenant: str, *, now_wall: float) -> TenantUsage:
        """What the store has of a tenant. now_wall: Unix seconds, which say what today is."""

    async def with_result(self, result_key: str, *, limit: int) -> list[JobRecord]:
        """Up to `limit` of the jobs that completed with that key, newest first; none for an empty one."""

    async def with_kept_picture(self, digest: str, *, tenant: str = "", limit: int) -> list[JobRecord]:
        """Up to `limit` of the completed jobs of that tenant that keep latents of the picture with that digest,
        newest first.
        """

    async def inputs(self, job_id: str) -> bytes:
        """What was given with a live job; empty when that was nothing, or it has ended."""

    async def last_end(self) -> EndTime | None:
        """The latest end of a job, by the steady clock: an earlier process was there then. Or None."""

    async def live(self) -> list[JobRecord]:
        """All jobs that have not ended, oldest first."""

    async def contents(self) -> dict[str, set[str]]:
        """The tenants that have each stored picture, and what is kept of it, by digest."""

    async def page(
        self, wanted: JobFilter = ALL_JOBS, *, size: int, before_sequence: int | None = None
    ) -> list[JobRecord]:
        """Up to `size` of the jobs that are wanted, newest first, and older than that sequence."""

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        """Forgets up to `limit` jobs and returns how many; call again while that is `limit`.

        Forgotten are jobs that ended before that time, those that ended first before others; and as many more ended
        ones as it takes until at most max_jobs are remembered, live ones included, with specs and results of at most
        max_bytes. Of these cancelled and failed ones go first, and completed ones when there are no others; always the
        oldest end of the peer that has the most of the kind, in number while there are too many, else in bytes (of two
        peers with as much the first by name). So whoever makes many forgets its own.
        """

    async def probe(self) -> None:
        """Writes what is there already: returns when something could be written."""
