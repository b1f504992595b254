"""The thread of storage work: its order, its bounds, and its end."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from bottega.errors import StorageUnavailable
from bottega.storage import StorageThread


async def _hanging(thread: StorageThread) -> tuple[asyncio.Task[bool], threading.Event]:
    """Work that the thread has begun with, and the gate that it waits for."""
    hangs, gate = threading.Event(), threading.Event()

    def hang() -> bool:
        hangs.set()
        return gate.wait()

    work = asyncio.create_task(thread.run(hang))
    while not hangs.is_set():  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0)
    return work, gate


async def test_work_is_done_in_order_and_its_errors_come_back() -> None:
    thread = StorageThread("test")
    done: list[int] = []
    await asyncio.gather(*(thread.run(partial(done.append, number)) for number in range(50)))
    assert done == list(range(50))
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    await thread.close()


async def test_a_disk_that_hangs_holds_up_nobody_for_ever_and_no_more_than_the_bound() -> None:
    thread = StorageThread("hangs", max_waiting=2, wait_s=0.05)
    hanging, gate = await _hanging(thread)
    dropped: list[str] = []
    (ours,) = (other for other in threading.enumerate() if other.name == "hangs")
    waiting = [asyncio.create_task(thread.run(lambda: dropped.append("ran"))) for _ in range(3)]
    results = await asyncio.gather(hanging, *waiting, return_exceptions=True)
    causes = [result.metadata["cause"] for result in results if isinstance(result, StorageUnavailable)]
    assert sorted(causes) == ["EAGAIN", "ETIMEDOUT", "ETIMEDOUT", "ETIMEDOUT"]
    with pytest.raises(StorageUnavailable):
        await thread.close()
    gate.set()
    await asyncio.to_thread(ours.join, 5)
    assert not ours.is_alive()
    assert not dropped, "nobody waits for it any more"


async def test_a_process_that_was_stopped_does_not_blame_the_disk() -> None:
    thread = StorageThread("stopped", wait_s=0.1)
    working, gate = await _hanging(thread)
    time.sleep(1.5)  # noqa: ASYNC251 - as SIGSTOP does: nothing of this process goes on
    asyncio.get_running_loop().call_later(0.1, gate.set)  # the thread goes on a little later than the loop
    assert await working
    await thread.close()


async def test_close_finishes_what_waits_and_ends_the_thread() -> None:
    thread = StorageThread("ends")
    done: list[int] = []
    work = [asyncio.create_task(thread.run(partial(done.append, number))) for number in range(9)]
    await asyncio.sleep(0)
    await thread.close()
    await asyncio.gather(*work)
    assert len(done) == 9
    assert "ends" not in {other.name for other in threading.enumerate()}
    with pytest.raises(StorageUnavailable, match="closed"):
        await thread.run(lambda: None)
