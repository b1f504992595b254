"""What is written of jobs: in order, and nobody waits for what will never be written."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from bottega.clocks import Clock
from bottega.gateway.jobs.write_queue import WriteQueue
from tests.fakes.memory_storage import Shelf, memory_storage


async def test_of_one_job_one_thing_is_written_after_the_other() -> None:
    queue = WriteQueue(memory_storage(Clock(), Shelf()))
    written: list[int] = []

    async def write(number: int) -> int:
        await asyncio.sleep(0.002 * (3 - number))
        written.append(number)
        return number

    queue.enqueue("a", partial(write, 0))
    queue.enqueue("a", partial(write, 1))
    assert await queue.enqueue_and_wait("a", partial(write, 2)) == 2
    assert written == [0, 1, 2]


async def test_of_what_only_the_newest_counts_no_more_waits_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers may attach to a job as often as they like while its disk is full, each with a later deadline."""
    monkeypatch.setattr("bottega.gateway.jobs.storage._RETRY_S", 0.01)
    shelf = Shelf(full=True)
    storage = memory_storage(Clock(), shelf)
    queue = WriteQueue(storage)
    tried: list[str] = []

    async def write(what: str) -> None:
        tried.append(what)
        await storage.jobs.probe()

    queue.enqueue("a", partial(write, "begun"))
    for number in range(1000):
        queue.enqueue("a", partial(write, f"until {number}"))
    ended = asyncio.create_task(queue.enqueue_and_wait("a", partial(write, "ended")))
    await asyncio.sleep(0.02)
    assert set(tried) == {"begun"}
    shelf.full = False
    await asyncio.wait_for(storage.jobs.open(), 1)
    await asyncio.wait_for(ended, 1)
    assert [*dict.fromkeys(tried)] == ["begun", "until 999", "ended"]


async def test_who_waits_for_what_a_full_disk_holds_up_is_sent_away_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.jobs.write_queue._CLOSE_S", 0.01)
    shelf = Shelf(full=True)
    storage = memory_storage(Clock(), shelf)
    queue = WriteQueue(storage)
    queue.enqueue("a", storage.jobs.probe)
    waiting = [asyncio.create_task(queue.enqueue_and_wait(job_id, storage.jobs.probe)) for job_id in ("a", "a", "b")]
    await asyncio.sleep(0)
    await queue.close()
    done, _ = await asyncio.wait(waiting, timeout=1)
    assert [task.cancelled() for task in waiting] == [True, True, True], f"{len(done)} of 3 have ended"
