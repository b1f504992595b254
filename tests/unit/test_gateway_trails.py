"""What is written of jobs: in order, and nobody waits for what will never be written."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from bottega.gateway.clock import Clock
from bottega.gateway.trails import Trails
from tests.memory_storehouse import Shelf, memory_storehouse


async def test_of_one_job_one_thing_is_written_after_the_other() -> None:
    trails = Trails(memory_storehouse(Clock(), Shelf()))
    written: list[int] = []

    async def write(number: int) -> int:
        await asyncio.sleep(0.002 * (3 - number))
        written.append(number)
        return number

    trails.note("a", partial(write, 0))
    trails.note("a", partial(write, 1))
    assert await trails.written("a", partial(write, 2)) == 2
    assert written == [0, 1, 2]


async def test_who_waits_for_what_a_full_disk_holds_up_is_sent_away_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.trails._CLOSE_S", 0.01)
    shelf = Shelf(full=True)
    storehouse = memory_storehouse(Clock(), shelf)
    trails = Trails(storehouse)
    trails.note("a", storehouse.jobs.probe)
    waiting = [asyncio.create_task(trails.written(job_id, storehouse.jobs.probe)) for job_id in ("a", "a", "b")]
    await asyncio.sleep(0)
    await trails.close()
    done, _ = await asyncio.wait(waiting, timeout=1)
    assert [task.cancelled() for task in waiting] == [True, True, True], f"{len(done)} of 3 have ended"
