"""Lists of a gateway's stored jobs, results that can be used again, and deletion of ended jobs.

A page of a list ends in a token, which is encrypted for one tenant and names the last job of the page. It is encrypted
because the job's sequence number would show how many jobs all tenants have.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from bottega.errors import DataLoss, InvalidRequest, JobNotFinished, JobNotFound, StorageUnavailable, Violation
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.store import JobFilter, JobRecord

# Number of jobs with the same result key that are checked. Older ones have usually lost their images.
_SAME_RESULT = 4

_KEY_BYTES = 32
_NONCE_BYTES = 12
# A nonce, 8 bytes of the sequence and a tag of 16 bytes, in base64.
_TOKEN_CHARACTERS = 48


class StoredJobs:
    """Lists stored jobs, finds those whose images can be used again, and deletes ended ones.

    Every method may raise StorageUnavailable and DataLoss.
    """

    def __init__(self, jobs: JobRepository) -> None:
        self._jobs = jobs
        self._storage = jobs.storage
        self._store = jobs.storage.jobs
        self._tokens = PageTokens(jobs.storage.folder / "page_tokens.key")

    def share_page_tokens(self, key: bytes) -> None:
        """Use a key of page tokens that other gateways have too, so that a list goes on at another one."""
        self._tokens.use(key)

    async def with_result(self, result_key: str) -> list[Job]:
        """Return the newest jobs that completed with this result key, read-only, newest first."""
        async with self._jobs.reading():
            records = await self._store.with_result(result_key, limit=_SAME_RESULT)
        return [self._jobs.read_only(record) for record in records]

    async def with_kept_picture(self, digest: str, *, tenant: str = "") -> list[Job]:
        """Return the newest jobs of a tenant that keep latents of this image, read-only, newest first."""
        async with self._jobs.reading():
            records = await self._store.with_kept_picture(digest, tenant=tenant, limit=_SAME_RESULT)
        return [self._jobs.read_only(record) for record in records]

    async def page(self, wanted: JobFilter, *, size: int, max_bytes: int, token: str) -> tuple[list[Job], str]:
        """Return a page of jobs, newest first, and the token of the next page ("" on the last).

        Args:
            wanted: The filter of the list.
            size: Upper bound on the number of jobs of the page.
            max_bytes: Upper bound on the total bytes of their records. The page has at least one job, however large.
            token: The token of this page, or "" for the first one.

        Raises:
            InvalidRequest: If the token is not valid for the tenant.
        """
        newest = self._tokens.sequence_of(token, tenant=wanted.tenant) if token else None
        async with self._jobs.reading():
            records = await self._store.page(wanted, size=size + 1, before_sequence=newest)
        page = list(_first(records[:size], max_bytes))
        jobs = [self._jobs.find_live(record.job_id) or self._jobs.read_only(record) for record in page]
        # The store may be some milliseconds behind the jobs in memory.
        matching = [job for job in jobs if not wanted.states or job.state in wanted.states]
        more = len(records) > len(page)
        return matching, self._tokens.token_of(page[-1].sequence, tenant=wanted.tenant) if more else ""

    async def delete(self, job_id: str, *, tenant: str = "") -> None:
        """Delete an ended job of a tenant and its images durably. A repeated call is harmless.

        Raises:
            JobNotFinished: If the job has not ended.
            JobNotFound: If the tenant has no such job and has deleted none with this ID.
            StorageUnavailable: If the disk cannot be written now. The job or some images may still exist; a repeated
                call deletes them.
        """
        contents: set[str] = set()
        try:
            job = await self._jobs.get(job_id, tenant=tenant)
            if job.live:
                raise JobNotFinished("the job has not ended: cancel it first")
            contents.update(content for image in job.images for content in image.contents)
        except JobNotFound:
            async with self._jobs.reading():
                if not await self._store.was_deleted(job_id, tenant=tenant):
                    raise
        # An image that another job is about to use stays: one that is pinned now or decided, or that is put or
        # renewed from now on. A job that was stored before is found in the store.
        began = self._storage.images.steady()
        needed = self._storage.images.pins | self._decided_contents()
        try:
            released = await self._store.delete(job_id, tenant=tenant, steady=self._storage.steady())
            unneeded = set(released or ()) - needed
            for content in sorted(contents | unneeded):
                await self._storage.images.release(
                    content, owner=tenant, put_before=began, job=job_id, needed=content not in unneeded
                )
        except (StorageUnavailable, DataLoss) as error:
            self._storage.report_failure(error)
            raise

    def _decided_contents(self) -> set[str]:
        """Return the digests of the images and latents of jobs whose completion is decided but not stored yet."""
        outcomes = [job.outcome for job in self._jobs.live() if job.outcome is not None]
        return {digest for outcome in outcomes for image in outcome.images for digest in image.contents}


def _first(records: Sequence[JobRecord], max_bytes: int) -> Iterator[JobRecord]:
    """Yield the first records whose sizes add up to at most `max_bytes`, but at least one."""
    room = max_bytes
    for place, record in enumerate(records):
        room -= record.answer_bytes
        if room < 0 and place:
            return
        yield record


class PageTokens:
    """Creates and reads page tokens. Tokens stay valid after a restart as long as the key file exists.

    Args:
        key_file: File of the encryption key. It is written when the first token is created.
    """

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file
        self._cipher: AESGCM | None = None

    def use(self, key: bytes) -> None:
        """Use this key of 32 bytes, not that of the file."""
        self._cipher = AESGCM(key)

    def token_of(self, sequence: int, *, tenant: str) -> str:
        """Return a tenant's token for the page that starts after the job with this sequence number."""
        nonce = os.urandom(_NONCE_BYTES)
        sealed = self._opened().encrypt(nonce, sequence.to_bytes(8, "big"), tenant.encode())
        return base64.urlsafe_b64encode(nonce + sealed).decode()

    def sequence_of(self, token: str, *, tenant: str) -> int:
        """Return the sequence number in a token. Raise InvalidRequest if the token was not made for the tenant."""
        if len(token) == _TOKEN_CHARACTERS:
            with contextlib.suppress(binascii.Error, ValueError, InvalidTag):
                raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
                sequence = self._opened().decrypt(raw[:_NONCE_BYTES], raw[_NONCE_BYTES:], tenant.encode())
                return int.from_bytes(sequence, "big")
        rule = "must be the next_page_token of an earlier answer"
        raise InvalidRequest(f"page_token: {rule}", violations=[Violation(field="page_token", description=rule)])

    def _opened(self) -> AESGCM:
        if self._cipher is None:
            self._cipher = AESGCM(_key_in(self._key_file))
        return self._cipher


def _key_in(path: Path) -> bytes:
    """Return the key in a file, or a new key. A new key that cannot be written is lost when this process ends."""
    with contextlib.suppress(OSError):
        key = path.read_bytes()
        if len(key) == _KEY_BYTES:
            return key
    key = os.urandom(_KEY_BYTES)
    temporary = path.with_name(f"{path.name}.new")
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(key)
        temporary.replace(path)
    return key
