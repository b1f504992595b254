"""What every job store does: durable, ordered, ended once, forgotten in slices. Run against each of BACKENDS."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest

from bottega.errors import InvalidRequest, StorageUnavailable
from bottega.gateway.jobs.store import EndTime, JobRecord, JobStore
from bottega.gateway.jobs.values import StoredImage
from bottega.v1.image_pb2 import JOB_STATE_CANCELLED, JOB_STATE_COMPLETED
from tests.service.gateway.jobs.store.conftest import Opener
from tests.support.job_store_backends import STEPS_DONE, answered, cancelled, completed, failed, record, running

IMAGES = (StoredImage(digest="a" * 64, size_bytes=10), StoredImage(digest="b" * 64, size_bytes=20))


async def _running(store: JobStore, job_id: str = "j1", *, request_id: str = "") -> JobRecord:
    added = await store.add(record(job_id, request_id=request_id))
    assert await store.update(job_id, running(1, started_wall=101.0))
    return added


async def _end(store: JobStore, job_id: str, *, ended_wall: float = 110.0) -> None:
    assert await store.update(job_id, failed(error=b"why", ended_wall=ended_wall))


async def _complete(store: JobStore, job_id: str, attempt: int) -> bool:
    return await store.update(job_id, completed(attempt, images=IMAGES, provenance=b"how", ended_wall=120.0))


async def _left(store: JobStore, *, max_jobs: int = 1000, max_bytes: int = 1 << 30) -> list[str]:
    while await store.forget(ended_before=0.0, max_jobs=max_jobs, max_bytes=max_bytes, limit=3) == 3:
        pass
    return [found.job_id for found in reversed(await store.page(size=100))]


async def test_a_text_with_a_nul_byte_is_refused_or_found_nowhere(store: JobStore) -> None:
    odd = "a\0b"
    for look_up in (store.get(odd), store.of_request(odd), store.delete(odd, steady=1.0), store.outbox.get(odd)):
        with contextlib.suppress(InvalidRequest):
            assert await look_up is None
    with contextlib.suppress(InvalidRequest):
        assert not await store.update(odd, running(1))
    with contextlib.suppress(InvalidRequest):
        added = await store.add(record("j1", request_id=odd))
        assert await store.of_request(odd) == added
    await store.add(record("j2", request_id="r2"))
    assert (await store.page(size=9))[0].job_id == "j2"


async def test_bytes_and_absent_times_survive(store: JobStore, another: Opener) -> None:
    odd = replace(
        record(), spec=bytes(range(256)) * 5000, deadline_steady=None, created_wall=1e9 + 1 / 3, fingerprint="ü'%"
    )
    added = await store.add(odd)
    assert await (await another()).get("j1") == added == replace(odd, sequence=added.sequence)


async def test_of_the_same_request_at_once_one_is_taken(store: JobStore, another: Opener) -> None:
    stores = [store, await another()]
    added = await asyncio.gather(*(stores[i % 2].add(record(f"j{i}", request_id="r")) for i in range(20)))
    assert len({found.job_id for found in added}) == 1
    assert len(await store.page(size=100)) == 1


async def test_of_racing_ends_one_wins(store: JobStore, another: Opener) -> None:
    stores = [store, await another(), await another()]
    for number in range(4):
        job_id = f"j{number}"
        await _running(store, job_id)
        ends = [_complete(stores[i % 3], job_id, 1) for i in range(6)]
        cancels = [stores[i % 3].update(job_id, cancelled(error=b"", ended_wall=125.0)) for i in range(3)]
        won = await asyncio.gather(*ends, *cancels)
        assert sum(won) == 1
        found = await stores[2].get(job_id)
        assert found is not None
        assert (found.state == JOB_STATE_COMPLETED) == any(won[:6]) == bool(found.images)


async def test_what_is_remembered_is_bounded_in_number_and_bytes(store: JobStore) -> None:
    for number in range(10):
        await store.add(record(f"j{number}", spec=bytes(10_000)), inputs=bytes(100_000))
        if number != 0:
            await _end(store, f"j{number}", ended_wall=float(number))
    assert await _left(store, max_jobs=10, max_bytes=1 << 20) == [f"j{number}" for number in range(10)]
    assert await _left(store, max_jobs=7, max_bytes=1 << 20) == ["j0", "j4", "j5", "j6", "j7", "j8", "j9"]
    assert await _left(store, max_jobs=7, max_bytes=45_000) == ["j0", "j7", "j8", "j9"]
    assert await _left(store, max_jobs=0, max_bytes=0) == ["j0"]
    await store.update("j0", running(1, started_wall=1.0, decisions=bytes(10_000)))
    await store.update("j0", completed(1, images=IMAGES, provenance=bytes(20_000), ended_wall=20.0))
    assert await _left(store, max_jobs=9, max_bytes=45_000) == ["j0"]
    assert await _left(store, max_jobs=9, max_bytes=35_000) == [], "what came of a job counts too"


async def test_the_peer_that_has_the_most_bytes_loses_its_own_where_these_are_too_many(store: JobStore) -> None:
    for number in range(5):
        await store.add(replace(record(f"large{number}", spec=bytes(20_000)), peer="large"))
        await store.update(f"large{number}", failed(error=b"", ended_wall=10.0 + number))
    for number in range(10):
        await store.add(replace(record(f"small{number}"), peer="small"))
        await _end(store, f"small{number}", ended_wall=float(number))
    small = [f"small{number}" for number in range(10)]
    assert await _left(store, max_bytes=50_000) == ["large3", "large4", *small]


async def test_what_is_kept_of_the_spec_of_a_cancelled_job_is_said_with_its_end(store: JobStore) -> None:
    await store.add(record("j1", spec=bytes(10_000)), inputs=bytes(10_000))
    await store.update("j1", cancelled(error=b"", ended_wall=1.0, spec=b"brief"))
    found = await store.get("j1")
    assert found is not None
    assert (found.spec, found.state, found.steps_done) == (b"brief", JOB_STATE_CANCELLED, STEPS_DONE)
    assert not await store.update("j1", cancelled(error=b"", ended_wall=2.0, spec=b"other"))
    assert await _left(store, max_bytes=1000) == ["j1"], "what has gone counts no more"


async def test_jobs_are_forgotten_by_the_steady_time_of_their_end(store: JobStore, another: Opener) -> None:
    assert await store.last_end() is None
    for number, (wall, steady) in enumerate([(100.0, 100.0), (20.0, 105.0), (900.0, 110.0)]):
        await store.add(record(f"j{number}"))
        await store.update(f"j{number}", failed(ended_wall=wall, ended_steady=steady))
    assert await store.last_end() == EndTime(wall=900.0, steady=110.0) == await (await another()).last_end()
    assert await store.forget(ended_before=101.0, max_jobs=9, max_bytes=1 << 30, limit=9) == 1
    assert await _left(store) == ["j1", "j2"]
    found = await store.get("j1")
    assert found is not None
    assert (found.ended_wall, found.ended_steady) == (20.0, 105.0)
    assert await _left(store, max_jobs=1) == ["j2"]
    await store.add(answered(record("j3"), ended_wall=950.0))
    assert await store.last_end() == EndTime(wall=950.0, steady=950.0), "also of a job that was complete at once"


async def test_jobs_are_found_by_a_picture_of_which_latents_are_kept(store: JobStore, another: Opener) -> None:
    kept, bare = replace(IMAGES[0], latents="c" * 64), replace(IMAGES[0], digest="e" * 64)
    for number, images in enumerate(((kept, bare), (bare,), (kept, kept), (kept,))):
        await _running(store, f"j{number}")
        if number < 3:
            await store.update(f"j{number}", completed(1, ended_wall=number + 1.0, images=images))
    added = await store.add(answered(record("j4"), ended_wall=5.0, images=(kept,)))
    for reader in (store, await another()):
        found = await reader.with_kept_picture(kept.digest, limit=9)
        assert [job.job_id for job in found] == ["j4", "j2", "j0"]
        assert found[0] == added
        assert found[2].images == (kept, bare)
        assert await reader.with_kept_picture(kept.digest, limit=1) == [added]
        assert await reader.with_kept_picture(bare.digest, limit=9) == [], "nothing is kept of it"
        assert await reader.with_kept_picture("c" * 64, limit=9) == []
    await store.update("j3", failed(ended_wall=4.0))
    await store.forget(ended_before=2.0, max_jobs=9, max_bytes=1 << 30, limit=9)
    assert [job.job_id for job in await store.with_kept_picture(kept.digest, limit=9)] == ["j4", "j2"]
    assert not await store.update("j2", failed(ended_wall=9.0)), "and it stays as it ended"


async def test_an_ended_job_is_deleted_with_its_request_and_says_what_nobody_else_has(store: JobStore) -> None:
    kept = StoredImage(digest="c" * 64, size_bytes=5, latents="d" * 64, latents_bytes=7)
    for job_id, tenant, images in (("j1", "", (*IMAGES, kept)), ("j2", "", IMAGES[:1]), ("j3", "other", IMAGES)):
        await store.add(replace(record(job_id, request_id="r1" if job_id == "j1" else ""), tenant=tenant))
        assert await store.delete(job_id, tenant=tenant, steady=110.0) is None, "it has not ended"
        await store.update(job_id, running(1, started_wall=101.0))
        await store.update(job_id, completed(1, images=images, provenance=b"how", ended_wall=120.0))
    assert await store.delete("j1", tenant="other", steady=130.0) is None, "it is another tenant's"
    assert not await store.was_deleted("j1")
    assert await store.delete("j1", steady=130.0) == ["b" * 64, "c" * 64, "d" * 64]
    assert (await store.get("j1"), await store.of_request("r1")) == (None, None)
    assert await store.with_kept_picture("c" * 64, limit=9) == []
    assert (await store.usage("", now_wall=200.0)).stored_bytes == IMAGES[0].size_bytes
    assert [found.job_id for found in await store.page(size=9)] == ["j2"]


async def test_a_repeated_deletion_is_answered_as_the_first_was_while_it_is_remembered(another: Opener) -> None:
    store = await another()
    await store.add(answered(record("j1"), ended_wall=120.0, images=IMAGES))
    assert await store.delete("j1", steady=130.0) == [image.digest for image in IMAGES]
    await store.add(answered(record("j2"), ended_wall=120.0, images=IMAGES[:1]))
    await store.close()
    store = await another()
    assert await store.delete("j1", steady=140.0) == [IMAGES[1].digest], "another job has the first one by now"
    assert await store.delete("j1", tenant="other", steady=140.0) is None
    assert (await store.was_deleted("j1"), await store.was_deleted("j1", tenant="other")) == (True, False)
    await store.forget(ended_before=131.0, max_jobs=99, max_bytes=1 << 20, limit=9)
    assert await store.delete("j1", steady=150.0) is None
    assert not await store.was_deleted("j1")


async def test_every_life_has_a_larger_generation(another: Opener) -> None:
    stores = [await another() for _ in range(3)]
    await stores[2].close()
    stores.append(await another())
    generations = [store.generation for store in stores]
    assert generations == sorted(set(generations))
    assert generations[0] > 0
    await stores[0].open()
    assert stores[0].generation == generations[0], "opening twice is one life"


async def test_a_store_that_is_opened_to_read_is_read_and_no_life_begins_with_it(another: Opener) -> None:
    empty = await another(to_read=True)
    with pytest.raises(StorageUnavailable):
        await empty.get("j1")
    added = await (await another()).add(record())
    reader = await another(to_read=True)
    assert (await reader.get("j1"), await reader.page(size=9), reader.generation) == (added, [added], 0)
    for write in (reader.add(record("j2")), reader.update("j1", running(1, started_wall=1.0)), reader.probe()):
        with pytest.raises(StorageUnavailable):
            await write
    await reader.open()
    assert reader.generation == 2
    await reader.add(record("j2"))
    await reader.open_to_read()
    await reader.add(record("j3"))


async def test_a_store_that_is_not_open_says_so(store: JobStore, another: Opener) -> None:
    added = await store.add(record())
    await store.probe()
    assert (await store.get("j1"), store.generation) == (added, 1), "a probe changes nothing"
    await store.close()
    await store.close()
    for call in (store.add(record("j2")), store.get("j1"), store.probe()):
        with pytest.raises(StorageUnavailable):
            await call
    assert await (await another()).page(size=9) == [added]
