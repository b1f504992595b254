"""Calls that are run in a thread with an event loop end whole, also when Ctrl-C comes at a bad moment."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, Iterator

import pytest

from bottega.client.sdk import loop_thread
from bottega.client.sdk.loop_thread import LoopThread


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
    monkeypatch.setattr(loop_thread, "_CANCEL_S", 0.0)
    pulled = thread.iterate(items())
    assert next(pulled) == 1
    with pytest.raises(KeyboardInterrupt):
        next(pulled)
    assert steps == ["closed"]
