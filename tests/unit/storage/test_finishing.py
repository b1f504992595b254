"""Work that is done to its end though its caller is cancelled, also twice; what is made and unmade around a block."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from bottega.background_tasks import acquired, run_to_end

_PATIENCE_S = 20.0


async def _cancelled_twice(task: asyncio.Task[object], gate: threading.Event) -> None:
    """While it waits for the gate, which opens then."""
    for _ in range(2):
        await asyncio.sleep(0.05)
        task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, _PATIENCE_S)


async def test_a_caller_that_is_cancelled_twice_is_so_when_the_work_has_ended() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(_PATIENCE_S)
        ended.set()

    await _cancelled_twice(asyncio.ensure_future(run_to_end(asyncio.to_thread(work))), gate)
    assert ended.is_set()


async def test_what_work_returns_and_raises_is_its_callers() -> None:
    assert await run_to_end(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="invalid literal"):
        await run_to_end(asyncio.to_thread(int, "x"))


@pytest.mark.parametrize("slow", ["to make", "to unmake"])
async def test_what_is_made_is_unmade_though_its_caller_goes_meanwhile(tmp_path: Path, slow: str) -> None:
    gate = threading.Event()

    def make() -> Path:
        if slow == "to make":
            gate.wait(_PATIENCE_S)
        (tmp_path / "made").touch()
        return tmp_path / "made"

    def unmake(path: Path) -> None:
        if slow == "to unmake":
            gate.wait(_PATIENCE_S)
        path.unlink()

    async def use() -> None:
        async with acquired(make, unmake) as path:
            assert path.exists()
            assert slow == "to unmake", "the caller has gone"

    await _cancelled_twice(asyncio.ensure_future(use()), gate)
    assert not (tmp_path / "made").exists()
