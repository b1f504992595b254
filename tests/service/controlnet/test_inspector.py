"""The process that looks at strangers' ControlNets: limited, started when it is needed, and ended when it is not."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from bottega.controlnet.inspector import ControlNetInspector
from bottega.errors import ControlNetUnusable, InvalidRequest, Unavailable
from tests.samples.hostile_controlnets import REAL, changed, with_config

_GONE_S = 20.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(REAL, tmp_path / "good")
    with_config(tmp_path / "bad", changed("layers_per_block", 10**10))
    return tmp_path.resolve()


async def _gone(pid: int) -> None:
    async with asyncio.timeout(_GONE_S):
        while psutil.pid_exists(pid):  # noqa: ASYNC110 - another process's end has no event here
            await asyncio.sleep(0.02)


async def test_it_serves_several_callers_and_ends_when_nobody_has_asked_for_a_while(root: Path) -> None:
    inspector = ControlNetInspector(idle_s=0.5)
    try:
        good = inspector.inspect("good", root / "good", root)
        bad = inspector.inspect("bad", root / "bad", root)
        again = inspector.inspect("good", root / "good", root)
        answers = await asyncio.gather(good, bad, again, return_exceptions=True)
        (pid,) = inspector.pids
        process = psutil.Process(pid)
        limit_bytes, _ = process.rlimit(psutil.RLIMIT_AS)
        assert limit_bytes <= process.memory_info().vms + (1 << 30)
        assert [type(answer) for answer in answers] == [type(None), InvalidRequest, type(None)]
        await _gone(pid)
        assert not inspector.pids
    finally:
        await inspector.stop()
    with pytest.raises(Unavailable):
        await inspector.inspect("good", root / "good", root)


async def test_one_that_reaches_its_limit_of_processor_time_says_that_the_folder_is_to_blame(root: Path) -> None:
    inspector = ControlNetInspector()
    try:
        await inspector.inspect("good", root / "good", root)
        (pid,) = inspector.pids
        os.kill(pid, signal.SIGSTOP)
        asking = asyncio.create_task(inspector.inspect("good", root / "good", root))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGPROF)  # as the limit does
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(ControlNetUnusable, match="more memory or time than it may"):
            await asking
    finally:
        await inspector.stop()


async def test_one_that_stands_still_is_given_up_after_one_deadline(root: Path) -> None:
    inspector = ControlNetInspector(deadline_s=3)
    try:
        await inspector.inspect("good", root / "good", root)
        (pid,) = inspector.pids
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(Unavailable, match="not looked at in time"):
            await asyncio.wait_for(inspector.inspect("good", root / "good", root), 20)
        assert not inspector.pids, "another process would have a deadline of its own"
    finally:
        await inspector.stop()


async def test_a_caller_that_goes_leaves_no_answer_to_the_next_one(root: Path) -> None:
    inspector = ControlNetInspector()
    try:
        await inspector.inspect("good", root / "good", root)
        asking = asyncio.create_task(inspector.inspect("bad", root / "bad", root))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait([asking])
        await inspector.inspect("good", root / "good", root)
    finally:
        await inspector.stop()
