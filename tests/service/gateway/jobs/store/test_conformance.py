"""What every job store does: durable, ordered, ended once, forgotten in slices. Run against each of BACKENDS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from bottega.errors import StorageUnavailable
from bottega.gateway.jobs.store import Change, EndTime, JobFilter, JobRecord, JobStore
from bottega.gateway.jobs.values import StoredImage
from bottega.v1 import image_pb2
from bottega.v1.image_pb2 import (
    JOB_STATE_CANCELLED,
    JOB_STATE_COMPLETED,
    JOB_STATE_FAILED,
    JOB_STATE_QUEUED,
    JobState,
)
from tests.support.job_store_backends import BACKENDS, cancelled, completed, extended, failed, queued, record, running

IMAGES = (StoredImage(digest="a" * 64, size_bytes=10), StoredImage(digest="b" * 64, size_bytes=20))


class Opener(Protocol):
    """Opens one more store of the same jobs."""

    async def __call__(self, *, to_read: bool = False) -> JobStore: ...


@pytest.fixture(params=BACKENDS)
async def another(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Opener]:
    """Opens stores of the same jobs, as several gateways or lives of one would; closes them at the end."""
    make: Callable[[Path], JobStore] = BACKENDS[request.param]
    async with contextlib.AsyncExitStack() as stack:

        async def opened(*, to_read: bool = False) -> JobStore:
            store = make(tmp_path)
            stack.push_async_callback(store.close)
            await (store.open_to_read() if to_read else store.open())
            return store

        yield opened


@pytest.fixture
async def store(another: Opener) -> JobStore:
    return await another()


async def _running(store: JobStore, job_id: str = "j1", *, request_id: str = "") -> JobRecord:
    added = await store.add(record(job_id, request_id=request_id))
    assert await store.update(job_id, running(1, started_wall=101.0))
    return added


async def _end(store: JobStore, job_id: str, *, ended_wall: float = 110.0) -> None:
    assert await store.update(job_id, failed(error=b"why", ended_wall=ended_wall))


async def _complete(store: JobStore, job_id: str, attempt: int) -> bool:
    return await store.update(job_id, completed(attempt, images=IMAGES, provenance=b"how", ended_wall=120.0))


async def test_a_job_comes_back_as_it_was_given_with_its_place(store: JobStore) -> None:
    first = await store.add(record("j1", request_id="r1"))
    second = await store.add(record("j2"))
    assert first == replace(record("j1", request_id="r1"), sequence=first.sequence)
    assert first.sequence < second.sequence
    assert await store.get("j1") == first
    assert await store.of_request("r1") == first
    assert await store.get("j3") is None
    assert await store.of_request("r3") is None
    assert await store.of_request("") is None


async def test_bytes_and_absent_times_survive(store: JobStore, another: Opener) -> None:
    odd = replace(
        record(), spec=bytes(range(256)) * 5000, deadline_wall=None, created_wall=1e9 + 1 / 3, fingerprint="ü'%"
    )
    added = await store.add(odd)
    assert await (await another()).get("j1") == added == replace(odd, sequence=added.sequence)


async def test_a_known_request_gives_its_job_and_takes_nothing(store: JobStore) -> None:
    first = await store.add(record("j1", request_id="r"))
    assert await store.add(record("j2", request_id="r"), inputs=b"x") == first
    assert await store.get("j2") is None
    assert await store.add(record("j1", request_id="other")) == first, "nor does a known job"
    assert await store.of_request("other") is None
    await _end(store, "j1")
    again = await store.add(record("j2", request_id="r"))
    assert (again.job_id, again.state, again.fingerprint) == ("j1", JOB_STATE_FAILED, first.fingerprint)


async def test_of_the_same_request_at_once_one_is_taken(store: JobStore, another: Opener) -> None:
    stores = [store, await another()]
    added = await asyncio.gather(*(stores[i % 2].add(record(f"j{i}", request_id="r")) for i in range(20)))
    assert len({found.job_id for found in added}) == 1
    assert len(await store.page(size=100)) == 1


async def test_a_retry_takes_the_request_id_of_the_failed_job_that_it_names(store: JobStore) -> None:
    await store.add(record("j1", request_id="r"))
    assert (await store.add(record("j2", request_id="r"), replaces="j1")).job_id == "j1", "it has not failed"
    await _end(store, "j1", ended_wall=110)
    assert (await store.add(record("j2", request_id="r"), replaces="j0")).job_id == "j1", "another one is named"
    second = await store.add(record("j2", request_id="r"), replaces="j1")
    assert second.job_id == "j2"
    assert (await store.add(record("j3", request_id="r"), replaces="j1")).job_id == "j2", "the retry came first"
    assert await store.of_request("r") == second
    first = await store.get("j1")
    assert first is not None
    assert first.request_id == "r"
    assert await store.forget(ended_before=111, max_jobs=9, max_bytes=1 << 30, limit=9) == 1
    assert await store.of_request("r") == second, "the forgotten one does not take the newer one's request along"


async def test_a_request_whose_images_have_gone_is_drawn_again_and_a_cancelled_one_is_not(store: JobStore) -> None:
    await _running(store, "j1", request_id="r")
    await _complete(store, "j1", 1)
    assert (await store.add(record("j2", request_id="r"))).job_id == "j1"
    assert (await store.add(record("j2", request_id="r"), replaces="j1")).job_id == "j2"
    assert await store.update("j2", cancelled(error=b"", ended_wall=130.0))
    assert (await store.add(record("j3", request_id="r"), replaces="j2")).job_id == "j2"


async def test_a_probe_writes_and_changes_nothing(store: JobStore) -> None:
    added = await store.add(record("j1"))
    await store.probe()
    assert (await store.get("j1"), store.generation) == (added, 1)
    await store.close()
    with pytest.raises(StorageUnavailable):
        await store.probe()


async def test_only_the_newest_attempt_counts(store: JobStore) -> None:
    await _running(store)
    assert not await store.update("j1", running(0)), "numbers only rise"
    assert await store.update("j1", queued(1, deaths=1))
    assert not await _complete(store, "j1", 1), "nobody waits for a lost attempt"
    assert await store.update("j1", running(3, started_wall=103.0))
    for late in (1, 2):
        assert not await store.update("j1", running(late))
        assert not await store.update("j1", queued(late, deaths=9))
    for other in (1, 2, 4):
        assert not await _complete(store, "j1", other)
    found = await store.get("j1")
    assert found is not None
    assert (found.attempt, found.deaths, found.started_wall) == (3, 1, 101.0)
    assert await _complete(store, "j1", 3)


async def test_what_attempts_decide_stays_for_the_next_ones(store: JobStore) -> None:
    await _running(store)
    assert await store.update("j1", running(1, decisions=b"decided"))
    assert await store.update("j1", queued(1))
    assert await store.update("j1", running(2))
    assert not await store.update("j1", running(1, decisions=b"late"))
    (found,) = await store.live()
    assert found.decisions == b"decided"


async def test_an_attempt_that_was_given_up_goes_on_where_its_worker_has_it_all_the_same(store: JobStore) -> None:
    await _running(store)
    await store.update("j1", queued(1))
    assert await store.update("j1", running(1, started_wall=102.0))
    assert await _complete(store, "j1", 1)


async def test_a_completed_job_keeps_what_came_of_it_and_changes_no_more(store: JobStore) -> None:
    added = await _running(store)
    assert await _complete(store, "j1", 1)
    assert not await _complete(store, "j1", 1)
    assert not await store.update("j1", cancelled(error=b"late", ended_wall=130.0))
    assert not await store.update("j1", running(2, started_wall=130.0))
    assert not await store.update("j1", queued(1, deaths=1))
    assert not await store.update("j1", extended(500.0))
    assert await store.get("j1") == replace(
        added,
        state=JOB_STATE_COMPLETED,
        attempt=1,
        started_wall=101.0,
        ended_wall=120.0,
        ended_steady=120.0,
        images=IMAGES,
        provenance=b"how",
    )


@pytest.mark.parametrize(("state", "end"), [(JOB_STATE_FAILED, failed), (JOB_STATE_CANCELLED, cancelled)])
async def test_a_job_that_failed_says_why(
    store: JobStore, state: JobState.ValueType, end: Callable[..., Change]
) -> None:
    added = await store.add(record())
    assert await store.update("j1", end(error=b"why", ended_wall=130.0))
    assert await store.get("j1") == replace(added, state=state, error=b"why", ended_wall=130.0, ended_steady=130.0)
    assert not await store.update("j1", end(error=b"again", ended_wall=140.0))


async def test_of_racing_ends_one_wins(store: JobStore, another: Opener) -> None:
    stores = [store, await another(), await another()]
    for number in range(10):
        job_id = f"j{number}"
        await _running(store, job_id)
        ends = [_complete(stores[i % 3], job_id, 1) for i in range(6)]
        cancels = [stores[i % 3].update(job_id, cancelled(error=b"", ended_wall=125.0)) for i in range(3)]
        won = await asyncio.gather(*ends, *cancels)
        assert sum(won) == 1
        found = await stores[2].get(job_id)
        assert found is not None
        assert (found.state == JOB_STATE_COMPLETED) == any(won[:6]) == bool(found.images)


async def test_a_deadline_can_be_moved_while_the_job_lives(store: JobStore) -> None:
    await store.add(record())
    for deadline in (500.0, None, 200.0):
        assert await store.update("j1", extended(deadline))
        found = await store.get("j1")
        assert found is not None
        assert found.deadline_wall == deadline


async def test_nothing_happens_to_an_unknown_job(store: JobStore) -> None:
    assert not await store.update("no", running(1, started_wall=1.0))
    assert not await store.update("no", queued(1, deaths=1))
    assert not await store.update("no", extended(None))
    assert not await _complete(store, "no", 1)
    assert not await store.update("no", failed(error=b"", ended_wall=1.0))
    assert await store.inputs("no") == b""
    assert await store.page(size=5) == []


async def test_inputs_are_there_while_the_job_lives(store: JobStore, another: Opener) -> None:
    image = bytes(range(256)) * 10_000
    await store.add(record("j1"), inputs=image)
    await store.add(record("j2"), inputs=b"other")
    await store.add(record("j3"))
    await store.update("j1", running(1, started_wall=1.0))
    later = await another()
    assert [await later.inputs(job_id) for job_id in ("j1", "j2", "j3")] == [image, b"other", b""]
    await _complete(store, "j1", 1)
    await _end(store, "j2")
    assert [await later.inputs(job_id) for job_id in ("j1", "j2")] == [b"", b""]


async def test_live_jobs_come_in_their_order_also_in_a_later_life(store: JobStore, another: Opener) -> None:
    for number in range(6):
        await store.add(record(f"j{number}"))
    await store.update("j4", running(1, started_wall=1.0))
    await _end(store, "j1")
    await store.update("j0", running(1, started_wall=1.0))
    await _complete(store, "j0", 1)
    assert [found.job_id for found in await store.live()] == ["j2", "j3", "j4", "j5"]
    await store.close()
    later = await another()
    assert [found.job_id for found in await later.live()] == ["j2", "j3", "j4", "j5"]
    assert [found.state for found in await later.live()][2] == image_pb2.JOB_STATE_RUNNING
    assert await _complete(later, "j4", 1), "a worker brings what it drew while there was no gateway"


async def test_pages_are_newest_first_even_while_jobs_come_in(store: JobStore) -> None:
    for number in range(5):
        await store.add(record(f"j{number}"))
    first = await store.page(size=2)
    await store.add(record("newer"))
    second = await store.page(size=2, before_sequence=first[-1].sequence)
    third = await store.page(size=2, before_sequence=second[-1].sequence)
    assert [found.job_id for found in (*first, *second, *third)] == ["j4", "j3", "j2", "j1", "j0"]
    assert await store.page(size=2, before_sequence=third[-1].sequence) == []


async def test_pages_are_filtered_by_state_and_time(store: JobStore) -> None:
    for number in range(4):
        await store.add(record(f"j{number}", created_wall=100.0 + number))
    await _end(store, "j1")
    await store.update("j3", running(1, started_wall=1.0))

    async def found(**filters: Any) -> list[str]:
        return [each.job_id for each in await store.page(JobFilter(**filters), size=9)]

    assert await found(states=[JOB_STATE_QUEUED]) == ["j2", "j0"]
    assert await found(states={JOB_STATE_FAILED, image_pb2.JOB_STATE_RUNNING}) == ["j3", "j1"]
    assert await found(states=[JOB_STATE_CANCELLED]) == []
    assert await found(created_after=102.0) == ["j3", "j2"]
    assert await found(created_before=102.0) == ["j1", "j0"]
    assert await found(created_after=101.0, created_before=103.0, states=[JOB_STATE_QUEUED]) == ["j2"]


async def test_ended_jobs_are_forgotten_after_their_time_oldest_end_first_and_live_ones_never(store: JobStore) -> None:
    for number in range(6):
        await store.add(record(f"j{number}", request_id=f"r{number}"))
    for number, ended_wall in ((4, 10.0), (1, 20.0), (3, 30.0)):
        await _end(store, f"j{number}", ended_wall=ended_wall)

    async def forget(ended_before: float, limit: int) -> int:
        return await store.forget(ended_before=ended_before, max_jobs=100, max_bytes=1 << 30, limit=limit)

    assert await forget(10.0, 9) == 0
    assert await forget(31.0, 1) == 1
    assert await store.get("j4") is None
    assert await store.of_request("r4") is None
    assert await store.get("j1") is not None
    assert await forget(31.0, 9) == 2
    assert [found.job_id for found in await store.page(size=9)] == ["j5", "j2", "j0"]
    assert await forget(1e12, 9) == 0
    again = await store.add(record("j6", request_id="r4"))
    assert again.job_id == "j6", "the window of its request_id is over"
    await _end(store, "j6", ended_wall=5.0)
    assert await forget(6.0, 9) == 1
    assert (await store.add(record("j7"))).sequence > again.sequence, "places are not given twice"


async def test_what_is_remembered_is_bounded_in_number_and_bytes(store: JobStore) -> None:
    for number in range(10):
        await store.add(record(f"j{number}", spec=bytes(10_000)), inputs=bytes(100_000))
        if number != 0:
            await _end(store, f"j{number}", ended_wall=float(number))

    async def left(*, max_jobs: int, max_bytes: int) -> list[str]:
        while await store.forget(ended_before=0.0, max_jobs=max_jobs, max_bytes=max_bytes, limit=2) == 2:
            pass
        return [found.job_id for found in await store.page(size=20)]

    assert await left(max_jobs=10, max_bytes=1 << 20) == [f"j{number}" for number in range(9, -1, -1)]
    assert await left(max_jobs=7, max_bytes=1 << 20) == ["j9", "j8", "j7", "j6", "j5", "j4", "j0"]
    assert await left(max_jobs=7, max_bytes=45_000) == ["j9", "j8", "j7", "j0"]
    assert await left(max_jobs=0, max_bytes=0) == ["j0"]
    await store.update("j0", running(1, started_wall=1.0))
    await store.update("j0", completed(1, images=IMAGES, provenance=bytes(30_000), ended_wall=20.0))
    assert await left(max_jobs=9, max_bytes=45_000) == ["j0"]
    assert await left(max_jobs=9, max_bytes=35_000) == [], "what came of a job counts too"


async def _add_ended(store: JobStore, job_id: str, peer: str, ended_wall: float, *, how: JobState.ValueType) -> None:
    await store.add(replace(record(job_id, request_id=f"r-{job_id}"), peer=peer))
    if how == JOB_STATE_COMPLETED:
        await store.update(job_id, running(1, started_wall=1.0))
        await store.update(job_id, completed(1, images=IMAGES, provenance=b"how", ended_wall=ended_wall))
    else:
        end = failed if how == JOB_STATE_FAILED else cancelled
        await store.update(job_id, end(ended_wall=ended_wall))


async def _left(store: JobStore, *, max_jobs: int = 1000, max_bytes: int = 1 << 30, limit: int = 3) -> list[str]:
    while await store.forget(ended_before=0.0, max_jobs=max_jobs, max_bytes=max_bytes, limit=limit) == limit:
        pass
    return [found.job_id for found in reversed(await store.page(size=100))]


async def test_completed_jobs_go_when_there_are_no_cancelled_and_failed_ones_left(store: JobStore) -> None:
    ends = (JOB_STATE_COMPLETED, JOB_STATE_CANCELLED, JOB_STATE_COMPLETED, JOB_STATE_FAILED, JOB_STATE_CANCELLED)
    for number, how in enumerate(ends):
        await _add_ended(store, f"j{number}", "here", float(number), how=how)
    assert await _left(store, max_jobs=4) == ["j0", "j2", "j3", "j4"]
    assert await _left(store, max_jobs=2) == ["j0", "j2"]
    for number in range(20):
        await _add_ended(store, f"flood{number}", "here", 10.0 + number, how=JOB_STATE_CANCELLED)
    assert await _left(store, max_jobs=3) == ["j0", "j2", "flood19"]
    assert await _left(store, max_jobs=3, max_bytes=1500) == ["j0", "j2"]
    found = await store.of_request("r-j0")
    assert found is not None
    assert found.images == IMAGES
    assert await _left(store, max_jobs=1) == ["j2"]


@pytest.mark.parametrize("how", [JOB_STATE_COMPLETED, JOB_STATE_FAILED])
async def test_the_peer_that_has_the_most_loses_its_own(store: JobStore, how: JobState.ValueType) -> None:
    for number in range(3):
        await _add_ended(store, f"theirs{number}", "theirs", float(number), how=how)
    for number in range(30):
        await _add_ended(store, f"flood{number}", "flood", 10.0 + number, how=how)
    theirs = [f"theirs{number}" for number in range(3)]
    assert await _left(store, max_jobs=10) == [*theirs, *(f"flood{number}" for number in range(23, 30))]
    assert await _left(store, max_jobs=6) == [*theirs, "flood27", "flood28", "flood29"]
    assert await _left(store, max_jobs=4) == ["theirs1", "theirs2", "flood28", "flood29"], "then both alike"
    for job_id in ("theirs0", "flood0"):
        assert await store.of_request(f"r-{job_id}") is None


async def test_the_peer_that_has_the_most_bytes_loses_its_own_where_these_are_too_many(store: JobStore) -> None:
    for number in range(5):
        await store.add(replace(record(f"large{number}", spec=bytes(20_000)), peer="large"))
        await store.update(f"large{number}", failed(error=b"", ended_wall=10.0 + number))
    for number in range(10):
        await _add_ended(store, f"small{number}", "small", float(number), how=JOB_STATE_FAILED)
    small = [f"small{number}" for number in range(10)]
    assert await _left(store, max_bytes=50_000) == ["large3", "large4", *small]


async def test_a_later_store_knows_what_each_peer_has(store: JobStore, another: Opener) -> None:
    for number in range(6):
        await _add_ended(store, f"j{number}", "ab"[number > 1], float(number), how=JOB_STATE_COMPLETED)
    found = await store.get("j5")
    assert found is not None
    assert found.peer == "b"
    await store.close()
    assert await _left(await another(), max_jobs=4) == ["j0", "j1", "j4", "j5"]


async def test_what_is_kept_of_the_spec_of_a_cancelled_job_is_said_with_its_end(store: JobStore) -> None:
    await store.add(record("j1", spec=bytes(10_000)), inputs=bytes(10_000))
    await store.update("j1", cancelled(error=b"", ended_wall=1.0, spec=b"brief"))
    found = await store.get("j1")
    assert found is not None
    assert (found.spec, found.state) == (b"brief", JOB_STATE_CANCELLED)
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
    await store.close()
    await store.close()
    with pytest.raises(StorageUnavailable):
        await store.add(record("j2"))
    with pytest.raises(StorageUnavailable):
        await store.get("j1")
    assert await (await another()).page(size=9) == [added]
