"""The process that looks at untrusted ControlNets: limited, started when it is needed, and ended when it is not."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from bottega.controlnet import engine_client
from bottega.controlnet.engine_client import ControlNetInspector
from bottega.errors import ControlNetUnusable, InvalidRequest, Unavailable
from tests.samples.hostile_controlnets import HOSTILE, REAL, changed, with_config
from tests.support.waiting import eventually
from tests.support.warm_start.sitecustomize import COLD

# One event loop, and so one process, which takes seconds to import its libraries.
pytestmark = pytest.mark.asyncio(loop_scope="module")
_SCRIPT = """
import sys, time
from bottega.process.child import FramedPipe

channel = FramedPipe.from_fd(int(sys.argv[sys.argv.index("--fd") + 1]))
channel.send(b"")
while (frame := channel.recv()) is not None:
    if b"stands still" in frame:
        time.sleep(60)
    channel.send(b"")
"""
# What is read of a folder is kilobytes.
_MOST_GROWTH_BYTES = 32 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(REAL, tmp_path / "good")
    with_config(tmp_path / "bad", changed("layers_per_block", 10**10))
    return tmp_path.resolve()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[ControlNetInspector]:
    """It starts another process where a test has ended the one before. None is a fork: their memory is measured."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in COLD.items():
            patch.setenv(name, value)
        made = ControlNetInspector()
        yield made
        await made.stop()


async def test_it_serves_several_callers(shared: ControlNetInspector, root: Path) -> None:
    good = shared.inspect("good", root / "good", root)
    bad = shared.inspect("bad", root / "bad", root)
    again = shared.inspect("good", root / "good", root)
    answers = await asyncio.gather(good, bad, again, return_exceptions=True)
    (pid,) = shared.pids
    process = psutil.Process(pid)
    limit_bytes, _ = process.rlimit(psutil.RLIMIT_AS)
    assert limit_bytes <= process.memory_info().vms + (1 << 30)
    assert [type(answer) for answer in answers] == [type(None), InvalidRequest, type(None)]


async def test_hostile_configurations_are_refused_and_its_memory_stays_flat(
    shared: ControlNetInspector, root: Path
) -> None:
    await shared.inspect("good", root / "good", root)
    (pid,) = shared.pids
    before_bytes = psutil.Process(pid).memory_info().rss
    for number, (field, value) in enumerate(HOSTILE):
        with_config(folder := root / f"hostile-{number}", changed(field, value))
        with pytest.raises(InvalidRequest, match=re.escape(f"config.json: {field}: ")):
            await shared.inspect("bad", folder, root)
    assert shared.pids == [pid]
    assert psutil.Process(pid).memory_info().rss < before_bytes + _MOST_GROWTH_BYTES


async def test_a_caller_that_goes_leaves_no_answer_to_the_next_one(shared: ControlNetInspector, root: Path) -> None:
    await shared.inspect("good", root / "good", root)
    asking = asyncio.create_task(shared.inspect("bad", root / "bad", root))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    await shared.inspect("good", root / "good", root)


async def test_one_that_reaches_its_limit_of_processor_time_says_that_the_folder_is_to_blame(
    shared: ControlNetInspector, root: Path
) -> None:
    await shared.inspect("good", root / "good", root)
    (pid,) = shared.pids
    os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(shared.inspect("good", root / "good", root))
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGPROF)  # as the limit does
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(ControlNetUnusable, match="more memory or time than allowed"):
        await asking


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the inspection's place, without its libraries."""
    (tmp_path / "scripted_inspection.py").write_text(_SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(engine_client, "INSPECTION_MODULE", "scripted_inspection")


@pytest.mark.usefixtures("scripted")
async def test_one_that_stands_still_is_given_up_after_one_deadline(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limited = ControlNetInspector(deadline_s=1)
    with pytest.raises(Unavailable, match="not checked in time"):
        await limited.inspect("stands still", root / "good", root)
    (lost,) = (record for record in caplog.records if record.getMessage() == "a child process was lost during a call")
    assert lost.why == "stood still"  # type: ignore[attr-defined]
    assert not limited.pids, "another process would have a deadline of its own"


@pytest.mark.usefixtures("scripted")
async def test_its_process_ends_when_nobody_has_asked_for_a_while(root: Path) -> None:
    idle = ControlNetInspector(idle_s=0.5)
    await idle.inspect("good", root / "good", root)
    (pid,) = idle.pids
    await eventually(lambda: not psutil.pid_exists(pid))
    assert not idle.pids
    await idle.stop()
    with pytest.raises(Unavailable):
        await idle.inspect("good", root / "good", root)
