"""The interface of a job store and its promises, which the conformance tests check for each implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from bottega.gateway.jobs.store.record import ALL_JOBS, Change, EndTime, JobFilter, JobRecord, TenantUsage


class JobStore(Protocol):
    """A store of jobs, which outlive the gateway.

    - What a method has acknowledged by returning is durable, and every later read, by any store of the same jobs,
      sees it.
    - A job ends once: of any number of changes that would end it, from any number of stores, one takes effect.
    - Every method may raise StorageUnavailable if the disk is full or cannot be used. Then nothing was acknowledged,
      though it may have happened, and the call may be repeated. Reads go on if they can.
    - Every method may raise DataLoss because of damage, and then gives no answer. Once the whole store was seen to be
      damaged, nothing is written. A job that is found is still good; one that is not found is DataLoss, as every list
      is.
    - While the store as a whole is sound, a damaged job does not affect others: lists leave it out, the log names it,
      and it is left as it is. Reading it raises DataLoss.
    - A cancelled call may have happened. A caller that must know awaits it to its end (asyncio.shield).
    """

    @property
    def generation(self) -> int:
        """Number of this life of the gateway, larger than that of every earlier one; 0 before `open`."""

    async def open(self) -> None:
        """Create the store or check it. It may be called again until it succeeds.

        After StorageUnavailable and DataLoss, reads work as far as they can.

        Raises:
            DataLoss: If it is damaged; the error says what to do.
            ConfigError: If it is the store of another version or of something else.
        """

    async def open_to_read(self) -> None:
        """Make reads work as far as they can, without writing anything; `open` may follow.

        Raises as `open` does. Harmless if there is no store yet; none is created.
        """

    async def close(self) -> None:
        """Finish the operations that have begun, and close the store."""

    @property
    def lost(self) -> bool:
        """Whether the open store has lost its files: methods raise StorageUnavailable until `remake` succeeds."""

    async def remake(self, live: AsyncIterator[tuple[JobRecord, bytes]]) -> None:
        """Make a lost store anew with these live jobs and their inputs. Harmless if it is not lost.

        It may be called again after it failed.
        """

    async def add(self, record: JobRecord, *, inputs: bytes = b"", replaces: str = "") -> JobRecord:
        """Add a job that is queued or already completed, and return it with its sequence.

        If its job_id or its tenant's request_id is known and not forgotten, nothing is added and the known job is
        returned: compare its job_id and its fingerprint.

        Args:
            record: The job.
            inputs: The complete GenerationSpec if the job has input images; needed until the job ends.
            replaces: job_id of the failed job whose request_id this retry takes over, or of a completed one whose
                images have gone.
        """

    async def update(self, job_id: str, change: Change) -> bool:
        """Write what `change` makes of a job, and return whether it changed anything; False for an unknown job.

        The inputs of a job that ends are removed.
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
        """Return a job, or None. A job of another tenant takes as long as none.

        Args:
            job_id: ID of the job.
            tenant: The tenant that it must belong to; None means any.
        """

    async def of_request(self, request_id: str, *, tenant: str = "") -> JobRecord | None:
        """Return the newest job of a tenant's idempotency key, or None."""

    async def usage(self, tenant: str, *, now_wall: float) -> TenantUsage:
        """Return a tenant's jobs and bytes in the store.

        Args:
            tenant: The tenant.
            now_wall: The time in Unix seconds, from which the start of the day is computed.
        """

    async def with_result(self, result_key: str, *, limit: int) -> list[JobRecord]:
        """Return up to `limit` jobs that completed with that key, newest first; none for an empty key."""

    async def with_kept_picture(self, digest: str, *, tenant: str = "", limit: int) -> list[JobRecord]:
        """Return up to `limit` completed jobs of a tenant that keep latents of a picture, newest first."""

    async def inputs(self, job_id: str) -> bytes:
        """Return the inputs of a live job; empty if it has none or has ended."""

    async def last_end(self) -> EndTime | None:
        """Return the latest end of a job by the steady clock, when an earlier process ran; or None."""

    async def live(self) -> list[JobRecord]:
        """Return all jobs that have not ended, oldest first."""

    async def contents(self) -> dict[str, set[str]]:
        """Return the owners of each stored picture and each file of kept latents: tenants by digest."""

    async def page(
        self, wanted: JobFilter = ALL_JOBS, *, size: int, before_sequence: int | None = None
    ) -> list[JobRecord]:
        """Return up to `size` of the wanted jobs that are older than a sequence, newest first."""

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        """Forget up to `limit` jobs and return how many; call it again while that is `limit`.

        Jobs that ended before `ended_before` are forgotten, those that ended first before others. Then more ended ones
        are, until at most `max_jobs` are remembered, live ones included, with records of at most `max_bytes`. Of these,
        cancelled and failed ones go first, and completed ones if there are no others; always the oldest end of the peer
        that has the most of the kind, in number while there are too many, else in bytes (of two peers with as much, the
        first by name). So a peer that makes many jobs loses its own.
        """

    async def probe(self) -> None:
        """Write something that changes nothing, and return when that succeeded."""
