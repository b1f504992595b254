"""One thing after the other, with deadlines, and an end."""

from __future__ import annotations

import threading

import pytest

from bottega.errors import StorageUnavailable
from bottega.storage.store_thread import StoreThread
from tests.support.waiting import wait_until


def _thread(every_s: float = 60.0) -> tuple[StoreThread, list[str]]:
    ticks: list[str] = []
    thread = StoreThread("test", tick=lambda: ticks.append("tick"), every_s=every_s)
    thread.start()
    return thread, ticks


def _fail() -> None:
    raise ZeroDivisionError


def test_work_is_done_in_order_and_a_call_waits_for_what_was_posted() -> None:
    thread, _ = _thread()
    done: list[int] = []
    for number in range(100):
        thread.post(lambda number=number: done.append(number))  # type: ignore[misc]
    assert thread.call(lambda: list(done)) == list(range(100))
    assert thread.end()


def test_a_failure_is_raised_where_it_was_called_and_ends_nothing() -> None:
    thread, _ = _thread()
    thread.post(_fail)
    with pytest.raises(ZeroDivisionError):
        thread.call(_fail)
    assert thread.call(lambda: 7) == 7
    assert thread.end()


def test_a_call_that_takes_too_long_is_given_up_and_not_made_later() -> None:
    thread, _ = _thread()
    go_on, done = threading.Event(), []
    thread.post(lambda: [go_on.wait(60.0)])  # type: ignore[arg-type]
    with pytest.raises(StorageUnavailable, match="does not answer"):
        thread.call(lambda: done.append(1), wait_s=0.01)
    assert not thread.end(wait_s=0.01)
    go_on.set()
    assert thread.end()
    assert not done


def test_the_tick_comes_where_nothing_else_does() -> None:
    thread, ticks = _thread(every_s=0.01)
    wait_until(lambda: len(ticks) > 2, "it to tick")
    assert thread.end()


def test_the_tick_comes_as_often_where_something_is_always_asked() -> None:
    thread, ticks = _thread(every_s=0.01)
    given_up = threading.Event()

    def ask_again() -> None:
        if not given_up.is_set():
            thread.post(ask_again)

    thread.post(ask_again)
    try:
        wait_until(lambda: len(ticks) > 2, "it to tick though something waits all the time")
    finally:
        given_up.set()
    assert thread.end()


def test_a_thread_that_has_ended_or_never_began_refuses() -> None:
    thread, _ = _thread()
    assert thread.end()
    never = StoreThread("test", tick=lambda: None, every_s=1.0)
    assert never.end()
    for each in (thread, never):
        with pytest.raises(StorageUnavailable, match="closed"):
            each.call(lambda: 1)
