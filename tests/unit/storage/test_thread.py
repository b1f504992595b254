"""A thread for blocking work: its order, its bounds, its ticks, its deadlines, and its end."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from functools import partial

import pytest

from bottega.errors import StorageUnavailable
from bottega.storage import SerialThread
from tests.support.waiting import EVENTUALLY_S, wait_until


async def _hanging(thread: SerialThread) -> tuple[asyncio.Task[bool], threading.Event]:
    """Work that the thread has begun with, and the gate that it waits for."""
    hangs, gate = threading.Event(), threading.Event()

    def hang() -> bool:
        hangs.set()
        return gate.wait()

    work = asyncio.create_task(thread.run(hang))
    while not hangs.is_set():  # noqa: ASYNC110 - another thread sets it
        await asyncio.sleep(0)
    return work, gate


async def test_a_disk_that_hangs_holds_up_nobody_for_ever_and_no_more_than_the_bound() -> None:
    thread = SerialThread("hangs", max_waiting=2, wait_s=0.05)
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
    await asyncio.to_thread(ours.join, EVENTUALLY_S)
    assert not ours.is_alive()
    assert not dropped, "nobody waits for it any more"


async def test_a_process_that_was_stopped_does_not_blame_the_disk() -> None:
    thread = SerialThread("stopped", wait_s=0.1)
    working, gate = await _hanging(thread)
    time.sleep(1.5)  # noqa: ASYNC251 - as SIGSTOP does: nothing of this process goes on
    asyncio.get_running_loop().call_later(0.1, gate.set)  # the thread goes on a little later than the loop
    assert await working
    await thread.close()


async def test_close_finishes_what_waits_in_its_order_and_ends_the_thread() -> None:
    thread = SerialThread("ends")
    done: list[int] = []
    work = [asyncio.create_task(thread.run(partial(done.append, number))) for number in range(50)]
    failing = asyncio.create_task(thread.run(lambda: 1 // 0))
    await asyncio.sleep(0)
    await thread.close()
    await asyncio.gather(*work)
    assert done == list(range(50))
    with pytest.raises(ZeroDivisionError):
        await failing
    assert "ends" not in {other.name for other in threading.enumerate()}
    with pytest.raises(StorageUnavailable, match="closed"):
        await thread.run(lambda: None)


def _fail() -> None:
    raise ZeroDivisionError


def test_a_call_waits_for_what_was_posted_before() -> None:
    thread = SerialThread("test")
    done: list[int] = []
    for number in range(100):
        thread.post(partial(done.append, number))
    assert thread.call(lambda: list(done)) == list(range(100))
    assert thread.end()


def test_a_failure_is_raised_where_it_was_called_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    thread = SerialThread("test")
    thread.post(_fail)
    with pytest.raises(ZeroDivisionError):
        thread.call(_fail)
    assert thread.call(lambda: 7) == 7
    assert thread.end()
    assert [record.message for record in caplog.records] == ["work in the background failed"]


def test_a_call_that_takes_too_long_is_given_up_and_not_made_later() -> None:
    thread = SerialThread("test")
    go_on, done = threading.Event(), []
    thread.post(lambda: [go_on.wait(60.0)])  # type: ignore[arg-type]
    with pytest.raises(StorageUnavailable, match="does not answer"):
        thread.call(lambda: done.append(1), wait_s=0.01)
    assert not thread.end(wait_s=0.01)
    go_on.set()
    assert thread.end()
    assert not done


def test_the_tick_comes_as_often_where_something_is_always_asked() -> None:
    ticks: list[str] = []
    thread = SerialThread("test", tick=lambda: ticks.append("tick"), tick_s=0.01)
    thread.call(lambda: None)
    wait_until(lambda: len(ticks) > 2, "it to tick")
    given_up, before = threading.Event(), len(ticks)

    def ask_again() -> None:
        if not given_up.is_set():
            thread.post(ask_again)

    thread.post(ask_again)
    try:
        wait_until(lambda: len(ticks) > before + 2, "it to tick though something waits all the time")
    finally:
        given_up.set()
    assert thread.end()


def test_a_thread_that_has_ended_refuses_calls_and_drops_what_is_posted() -> None:
    ended, never_begun = SerialThread("test"), SerialThread("test")
    ended.call(lambda: None)
    done: list[int] = []
    for thread in (ended, never_begun):
        assert thread.end()
        with pytest.raises(StorageUnavailable, match="closed"):
            thread.call(lambda: 1)
        thread.post(lambda: done.append(1))
    assert not done


def test_an_end_without_what_waits_runs_none_of_it() -> None:
    thread = SerialThread("test")
    begun, go_on, done = threading.Event(), threading.Event(), []

    def hang() -> None:
        begun.set()
        go_on.wait(60.0)

    thread.post(hang)
    assert begun.wait(60.0)
    thread.post(lambda: done.append(1))
    assert not thread.end(wait_s=0.0, drop_waiting=True)
    go_on.set()
    assert thread.end()
    assert not done


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_niceness_is_added_to_what_the_process_has() -> None:
    """Only root may lower a nice value, as of a service that was started by `nice`."""
    found: list[int] = []

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def start() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice() + 7)
        thread = SerialThread("test", niceness=5)
        found.extend([nice(), thread.call(nice)])
        assert thread.end()

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    before, after = found
    assert after == min(before + 5, 19)
