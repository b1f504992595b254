"""The outbox of every job store: one event with the end of a job, kept until it is removed. Run against BACKENDS."""

from __future__ import annotations

import asyncio
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import DataLoss
from bottega.gateway.jobs.store import JobRecord, JobStore, OutboxEvent, SqliteJobStore
from tests.support.job_store_backends import answered, cancelled, completed, failed, record, running, sample_event


async def _ended(store: JobStore, job_id: str, *, tenant: str = "") -> None:
    await store.add(replace(record(job_id), tenant=tenant), event_of=sample_event)
    assert await store.update(job_id, failed(ended_wall=110.0), event_of=sample_event)


async def test_an_event_is_written_with_the_end_of_its_job_and_once(store: JobStore) -> None:
    for job_id in ("j1", "j2", "j3"):
        await store.add(record(job_id), event_of=sample_event)
        await store.update(job_id, running(1), event_of=sample_event)
    assert await store.outbox.places(after=0, limit=9) == [], "none of them has ended"
    ends = (completed(1, ended_wall=110.0), failed(ended_wall=111.0), cancelled(ended_wall=112.0))
    for job_id, end in zip(("j1", "j2", "j3"), ends, strict=True):
        raced = await asyncio.gather(*(store.update(job_id, end, event_of=sample_event) for _ in range(3)))
        assert sorted(raced) == [False, False, True]
    await store.add(answered(record("j4"), ended_wall=113.0), event_of=sample_event)
    await store.add(answered(record("j4"), ended_wall=114.0), event_of=sample_event)
    places = await store.outbox.places(after=0, limit=9)
    assert [place.event_id for place in places] == ["evt_j1", "evt_j2", "evt_j3", "evt_j4"]
    assert [place.created_wall for place in places] == [110.0, 111.0, 112.0, 113.0]
    assert await store.outbox.places(after=places[1].number, limit=1) == places[2:3]
    ended = await store.get("j2")
    assert ended is not None
    assert await store.outbox.get("evt_j2") == sample_event(ended)


async def test_a_failed_change_writes_no_event(store: JobStore) -> None:
    await store.add(record("j1"))

    def broken(job: JobRecord) -> OutboxEvent:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await store.update("j1", failed(ended_wall=110.0), event_of=broken)
    found = await store.get("j1")
    if isinstance(store, SqliteJobStore):
        assert found is not None
        assert found.live, "the end is undone with its event"
    assert await store.outbox.places(after=0, limit=9) == []


async def test_events_are_changed_and_removed_and_their_numbers_are_not_used_again(store: JobStore) -> None:
    await _ended(store, "j1")
    (first,) = await store.outbox.places(after=0, limit=9)
    event = await store.outbox.get("evt_j1")
    assert event is not None
    later = replace(event, attempts=2, due_steady=1234.5, error="it is down", dead=True)
    assert await store.outbox.replace(later)
    assert await store.outbox.get("evt_j1") == later
    assert await store.outbox.places(after=0, limit=9) == [replace(first, attempts=2, due_steady=1234.5, dead=True)]
    assert await store.outbox.remove(["evt_j1", "evt_unknown"]) == 1
    assert not await store.outbox.replace(later)
    assert await store.outbox.get("evt_j1") is None
    await _ended(store, "j2")
    (second,) = await store.outbox.places(after=first.number, limit=9)
    assert second.event_id == "evt_j2"


async def test_events_are_listed_by_tenant_and_by_whether_they_were_given_up(store: JobStore) -> None:
    for job_id, tenant in (("j1", "a"), ("j2", "b"), ("j3", "a"), ("j4", "a")):
        await _ended(store, job_id, tenant=tenant)
    event = await store.outbox.get("evt_j3")
    assert event is not None
    await store.outbox.replace(replace(event, dead=True))

    async def listed(
        *, tenant: str | None = None, dead: bool | None = None, before: int | None = None, size: int = 9
    ) -> list[str]:
        page = await store.outbox.page(tenant=tenant, dead=dead, before=before, size=size)
        return [event.job_id for _, event in page]

    assert await listed() == ["j4", "j3", "j2", "j1"]
    assert await listed(tenant="a") == ["j4", "j3", "j1"]
    assert await listed(tenant="a", dead=False) == ["j4", "j1"]
    assert await listed(dead=True) == ["j3"]
    newest = await store.outbox.page(tenant=None, dead=None, before=None, size=2)
    assert await listed(before=newest[-1][0], size=1) == ["j2"]


async def test_the_events_of_deleted_and_forgotten_jobs_are_still_delivered(store: JobStore) -> None:
    await _ended(store, "j1")
    await _ended(store, "j2")
    await store.delete("j1", steady=120.0)
    await store.forget(ended_before=200.0, max_jobs=9, max_bytes=1 << 20, limit=9)
    assert [place.event_id for place in await store.outbox.places(after=0, limit=9)] == ["evt_j1", "evt_j2"]


async def test_a_damaged_event_is_never_delivered_and_does_not_hide_others(tmp_path: Path) -> None:
    store = SqliteJobStore(tmp_path / "jobs.sqlite")
    await store.open()
    await _ended(store, "j1")
    await _ended(store, "j2")
    await store.close()
    connection = sqlite3.connect(tmp_path / "jobs.sqlite")
    connection.execute("UPDATE outbox SET url = 'https://evil.example/' WHERE job_id = 'j1'")
    connection.commit()
    connection.close()
    store = SqliteJobStore(tmp_path / "jobs.sqlite")
    await store.open()
    with pytest.raises(DataLoss):
        await store.outbox.get("evt_j1")
    assert len(await store.outbox.places(after=0, limit=9)) == 2
    assert [event.job_id for _, event in await store.outbox.page(tenant=None, dead=None, before=None, size=9)] == ["j2"]
    assert await store.outbox.remove(["evt_j1"]) == 1
    await store.close()
