"""A storage in memory that answers at once, for tests of the gateway's rules on a clock that is turned by hand.

Its job store keeps the rules of every store, and runs through the conformance tests as the others do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from bottega.clocks import Clock
from bottega.errors import StorageUnavailable
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import (
    ALL_JOBS,
    Change,
    EndTime,
    EventOf,
    JobFilter,
    JobRecord,
    OutboxEvent,
    OutboxPlace,
    TenantUsage,
    no_event,
)
from bottega.gateway.jobs.store.quotas import check_quotas
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas
from bottega.storage import ContentStore, os_errors
from bottega.v1.image_pb2 import JOB_STATE_COMPLETED, JOB_STATE_QUEUED

ResultT = TypeVar("ResultT")

# About what a record takes beside its bytes.
_RECORD_BYTES = 512


@dataclass
class Shelf:
    """What is left of a store when it is closed: jobs by sequence, oldest first. full: nothing can be written."""

    jobs: dict[int, JobRecord] = field(default_factory=dict)
    inputs: dict[str, bytes] = field(default_factory=dict)
    newest: dict[tuple[str, str], int] = field(default_factory=dict)
    deletions: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = field(default_factory=dict)
    events: dict[int, OutboxEvent] = field(default_factory=dict)
    sequence: int = 0
    event_number: int = 0
    generation: int = 0
    full: bool = False


class MemoryOutbox:
    """An Outbox on a shelf.

    Args:
        check: Raises if the store cannot be read; with True, if it cannot be written.
    """

    def __init__(self, shelf: Shelf, check: Callable[[bool], None]) -> None:
        self._shelf = shelf
        self._check = check

    async def places(self, *, after: int, limit: int) -> list[OutboxPlace]:
        self._check(False)
        return [_place(number, event) for number, event in self._shelf.events.items() if number > after][:limit]

    async def get(self, event_id: str) -> OutboxEvent | None:
        self._check(False)
        return next((event for event in self._shelf.events.values() if event.event_id == event_id), None)

    async def replace(self, event: OutboxEvent) -> bool:
        self._check(True)
        numbers = [number for number, other in self._shelf.events.items() if other.event_id == event.event_id]
        self._shelf.events.update(dict.fromkeys(numbers, event))
        return bool(numbers)

    async def remove(self, event_ids: Sequence[str]) -> int:
        self._check(True)
        before = len(self._shelf.events)
        kept = {number: event for number, event in self._shelf.events.items() if event.event_id not in event_ids}
        self._shelf.events = kept
        return before - len(kept)

    async def page(
        self, *, tenant: str | None, dead: bool | None, before: int | None, size: int
    ) -> list[tuple[int, OutboxEvent]]:
        self._check(False)
        return [
            (number, event)
            for number, event in reversed(self._shelf.events.items())
            if tenant in (None, event.tenant) and dead in (None, event.dead) and (before is None or number < before)
        ][:size]


class MemoryJobStore:
    """A JobStore. Several stores may have the same shelf."""

    def __init__(self, shelf: Shelf | None = None) -> None:
        self._shelf = shelf or Shelf()
        self.outbox = MemoryOutbox(self._shelf, lambda writes: self._check_room() if writes else self._check())
        self._opened = self._readable = False
        self._generation = 0

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def lost(self) -> bool:
        return False

    async def remake(self, live: AsyncIterator[tuple[JobRecord, bytes]]) -> None:
        del live

    async def open(self) -> None:
        self._readable = True
        if not self._opened:
            self._check_full()
            self._opened = True
            self._shelf.generation += 1
            self._generation = self._shelf.generation

    async def open_to_read(self) -> None:
        self._readable = self._shelf.generation > 0

    async def close(self) -> None:
        self._opened = self._readable = False

    async def add(
        self,
        record: JobRecord,
        *,
        inputs: bytes = b"",
        replaces: str = "",
        event_of: EventOf = no_event,
        quotas: Quotas = UNBOUNDED,
    ) -> JobRecord:
        self._check_room()
        known = await self.get(record.job_id)
        if known is None and record.request_id:
            known = await self.of_request(record.request_id, tenant=record.tenant)
            if known is not None and known.is_replaced_by(record, replaces=replaces):
                known = None
        if known is not None:
            return known
        usage = await self.usage(record.tenant, now_wall=record.created_wall)
        check_quotas(quotas, usage, now_wall=record.created_wall)
        self._shelf.sequence += 1
        taken = self._shelf.jobs[self._shelf.sequence] = replace(record, sequence=self._shelf.sequence)
        if record.request_id:
            self._shelf.newest[record.tenant, record.request_id] = taken.sequence
        if inputs:
            self._shelf.inputs[record.job_id] = inputs
        if not taken.live:
            self._announce(event_of(taken))
        return taken

    async def update(self, job_id: str, change: Change, *, event_of: EventOf = no_event) -> bool:
        self._check_room()
        record = await self.get(job_id)
        after = change(record) if record else None
        if after is None:
            return False
        self._shelf.jobs[after.sequence] = after
        if not after.live:
            self._shelf.inputs.pop(job_id, None)
        if record is not None and record.live and not after.live:
            self._announce(event_of(after))
        return True

    async def delete(self, job_id: str, *, tenant: str = "", steady: float) -> list[str] | None:
        self._check_room()
        record = await self.get(job_id, tenant=tenant)
        if record is not None and record.live:
            return None
        if record is not None:
            self._forget_one(record)
            self._shelf.deletions[tenant, job_id] = (steady, record.contents)
        elif not await self.was_deleted(job_id, tenant=tenant):
            return None
        owners = await self.contents()
        return [digest for digest in self._shelf.deletions[tenant, job_id][1] if tenant not in owners.get(digest, ())]

    async def was_deleted(self, job_id: str, *, tenant: str = "") -> bool:
        self._check()
        return (tenant, job_id) in self._shelf.deletions

    async def get(self, job_id: str, *, tenant: str | None = None) -> JobRecord | None:
        self._check()
        found = next((record for record in self._shelf.jobs.values() if record.job_id == job_id), None)
        return found if found and tenant in (None, found.tenant) else None

    async def of_request(self, request_id: str, *, tenant: str = "") -> JobRecord | None:
        self._check()
        return self._shelf.jobs.get(self._shelf.newest.get((tenant, request_id), 0))

    async def usage(self, tenant: str, *, now_wall: float) -> TenantUsage:
        self._check()
        own = [record for record in self._shelf.jobs.values() if record.tenant == tenant]
        return TenantUsage(
            jobs_today=sum(record.created_wall // 86400 == now_wall // 86400 for record in own),
            stored_bytes=sum(record.picture_bytes for record in own),
            jobs_in_minute=sum(record.created_wall > now_wall - 60 for record in own),
            oldest_in_minute=min((job.created_wall for job in own if job.created_wall > now_wall - 60), default=None),
            waiting=sum(record.state == JOB_STATE_QUEUED for record in own),
        )

    async def with_result(self, result_key: str, *, limit: int) -> list[JobRecord]:
        self._check()
        found = [record for record in reversed(self._shelf.jobs.values()) if record.result_key == result_key]
        return found[:limit] if result_key else []

    async def with_kept_picture(self, digest: str, *, tenant: str = "", limit: int) -> list[JobRecord]:
        self._check()
        found = [record for record in reversed(self._shelf.jobs.values()) if digest in record.kept_pictures]
        return [record for record in found if record.tenant == tenant][:limit]

    async def inputs(self, job_id: str) -> bytes:
        self._check()
        return self._shelf.inputs.get(job_id, b"")

    async def last_end(self) -> EndTime | None:
        self._check()
        ends = [
            EndTime(wall=record.ended_wall, steady=record.ended_steady)
            for record in self._shelf.jobs.values()
            if record.ended_wall is not None and record.ended_steady is not None
        ]
        return max(ends, key=lambda end: end.steady, default=None)

    async def live(self, job_ids: Sequence[str] | None = None) -> list[JobRecord]:
        self._check()
        live = [record for record in self._shelf.jobs.values() if record.live]
        return [record for record in live if job_ids is None or record.job_id in job_ids]

    async def page(
        self, wanted: JobFilter = ALL_JOBS, *, size: int, before_sequence: int | None = None
    ) -> list[JobRecord]:
        self._check()
        found = [
            record
            for record in reversed(self._shelf.jobs.values())
            if record.tenant == wanted.tenant
            and (not wanted.states or record.state in wanted.states)
            and (wanted.created_after is None or record.created_wall >= wanted.created_after)
            and (wanted.created_before is None or record.created_wall < wanted.created_before)
            and (before_sequence is None or record.sequence < before_sequence)
        ]
        return found[:size]

    async def contents(self) -> dict[str, set[str]]:
        self._check()
        owners: dict[str, set[str]] = {}
        for record in self._shelf.jobs.values():
            for digest in (digest for image in record.images for digest in image.contents):
                owners.setdefault(digest, set()).add(record.tenant)
        return owners

    async def forget(self, *, ended_before: float, max_jobs: int, max_bytes: int, limit: int) -> int:
        self._check()
        jobs, deletions = self._shelf.jobs, self._shelf.deletions
        self._shelf.deletions = {key: deletion for key, deletion in deletions.items() if deletion[0] >= ended_before}
        for forgotten in range(limit):
            ended = sorted(
                (record for record in jobs.values() if not record.live), key=lambda r: (r.ended_steady, r.sequence)
            )
            expired = [record for record in ended if (record.ended_steady or 0.0) < ended_before]
            too_many, too_large = len(jobs) > max_jobs, sum(map(_size_bytes, jobs.values())) > max_bytes
            if not expired and not (ended and (too_many or too_large)):
                return forgotten
            self._forget_one(expired[0] if expired else _dispensable(ended, by_bytes=not too_many))
        return limit

    def _announce(self, event: OutboxEvent | None) -> None:
        if event is not None and all(event.event_id != other.event_id for other in self._shelf.events.values()):
            self._shelf.event_number += 1
            self._shelf.events[self._shelf.event_number] = event

    def _forget_one(self, record: JobRecord) -> None:
        del self._shelf.jobs[record.sequence]
        if self._shelf.newest.get((record.tenant, record.request_id)) == record.sequence:
            del self._shelf.newest[record.tenant, record.request_id]

    async def probe(self) -> None:
        self._check_room()

    def _check_room(self) -> None:
        self._check_full()
        if not self._opened:
            raise os_errors.unavailable("the job store is not open", cause=os_errors.NOT_OPEN)

    def _check_full(self) -> None:
        self._check()
        if self._shelf.full:
            raise os_errors.unavailable("the disk is full", cause="ENOSPC")

    def _check(self) -> None:
        if not self._readable:
            raise os_errors.unavailable("the job store is not open", cause=os_errors.NOT_OPEN)


class MemoryImages(ContentStore):
    """Images in a dictionary, without bounds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(Path("/nowhere"), budget_bytes=1 << 30, ttl_s=1, clock=clock)
        self._data: dict[str, bytes] = {}

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    async def assign(self, owners: Mapping[str, Collection[str]]) -> None:
        """Without bounds, it does not matter whose they are."""

    async def put(self, digest: str, data: bytes, *, owner: str = "", job: str = "") -> None:
        self._data[digest] = data

    async def release(self, digest: str, *, owner: str, put_before: float, job: str = "", needed: bool = False) -> None:
        del owner, put_before, job
        if not needed:
            self._data.pop(digest, None)

    async def get(self, digest: str) -> bytes | None:
        return self._data.get(digest)

    async def renew(self, digest: str, *, owner: str = "", job: str = "") -> bool:
        return digest in self._data

    def holds(self, digest: str) -> bool:
        return digest in self._data

    async def probe(self) -> None:
        """It can always be written."""

    async def sweep(self) -> bool:
        return False


def memory_storage(clock: Clock, shelf: Shelf | None = None) -> Storage:
    """One that is open, as far as there is room on the shelf."""
    storage = Storage(
        folder=Path("/nowhere"),
        jobs=MemoryJobStore(shelf),
        images=MemoryImages(clock),
        max_jobs=1000,
        jobs_bytes=1 << 24,
        jobs_ttl_s=60,
        waiting_bytes=1 << 20,
    )
    try:
        at_once(storage.jobs.open())
    except StorageUnavailable as error:
        storage.report_failure(error)
    return storage


def _place(number: int, event: OutboxEvent) -> OutboxPlace:
    return OutboxPlace(
        number=number,
        event_id=event.event_id,
        tenant=event.tenant,
        host=event.host,
        due_steady=event.due_steady,
        created_wall=event.created_wall,
        attempts=event.attempts,
        dead=event.dead,
    )


def at_once(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """What work returns that never has to wait."""
    try:
        work.send(None)
    except StopIteration as done:
        result: ResultT = done.value
        return result
    raise AssertionError("it had to wait")


def _dispensable(ended: list[JobRecord], *, by_bytes: bool) -> JobRecord:
    """Which goes first where there are too many. ended: oldest end first."""
    kind = [record for record in ended if record.state != JOB_STATE_COMPLETED] or ended
    held: dict[str, int] = {}
    for record in kind:
        held[record.peer] = held.get(record.peer, 0) + (_size_bytes(record) if by_bytes else 1)
    peer = min(held, key=lambda peer: (-held[peer], peer))
    return next(record for record in kind if record.peer == peer)


def _size_bytes(record: JobRecord) -> int:
    images = sum(len(image.digest) for image in record.images)
    kept = (record.spec, record.decisions, record.provenance, record.error)
    return _RECORD_BYTES + images + sum(map(len, kept))
