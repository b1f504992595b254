"""The client without asyncio has the methods of the one with it, and each is that one's."""

from __future__ import annotations

import asyncio
import inspect
import signal
from collections.abc import AsyncGenerator, Iterator

import pytest

from bottega.client import AsyncClient, AsyncJob, Client, Job
from bottega.client.sdk import sync
from bottega.client.sdk.sync import LoopThread

PAIRS = [(AsyncClient, Client), (AsyncJob, Job)]


def _methods(kind: type) -> set[str]:
    return {name for name, member in inspect.getmembers(kind, callable) if not name.startswith("_")}


@pytest.mark.parametrize(("asynchronous", "blocking"), PAIRS)
def test_both_clients_offer_the_same(asynchronous: type, blocking: type) -> None:
    assert _methods(asynchronous) == _methods(blocking) != set()
    for name in _methods(asynchronous):
        theirs, ours = getattr(asynchronous, name), getattr(blocking, name)
        assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters, name
        assert ours.__doc__, name
        assert not inspect.iscoroutinefunction(ours), name


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.stop()


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Ctrl-C after a moment."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("interrupted")
def test_a_generator_that_lets_go_slowly_is_closed_after_it_has(
    thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    async def items() -> AsyncGenerator[int, None]:
        try:
            yield 1
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            steps.append("closed")

    # Whoever waited for the item gives up at once, as it does where the interrupt hits it before it can wait.
    monkeypatch.setattr(sync, "_CANCEL_S", 0.0)
    pulled = thread.iterate(items())
    assert next(pulled) == 1
    with pytest.raises(KeyboardInterrupt):
        next(pulled)
    assert steps == ["closed"]
