"""Child processes and pools of them: they answer, are missed when they die, and never outlive their parent."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from bottega.errors import Unavailable
from bottega.process.child import ChildProcess
from bottega.process.engine_supervisor import EngineTimeouts
from bottega.process.limited_process import CpuTime, ProcessSpec
from bottega.process.process_pool import PoolLimits, PreparedCall, ProcessPool
from bottega.worker.config import EngineConfig
from bottega.worker.engine_client import WorkerEngineClient

ECHO = """
import argparse, os, resource, signal, sys, time
from bottega.process.child import FramedPipe

parser = argparse.ArgumentParser()
parser.add_argument("--fd", type=int)
parser.add_argument("--deaf", action="store_true")
arguments = parser.parse_args()
channel = FramedPipe.from_fd(arguments.fd)
while (frame := channel.recv()) is not None:
    if frame == b"env":
        frame = os.environ["TINT"].encode()
    if frame == b"limit":
        frame = str(resource.getrlimit(resource.RLIMIT_AS)[0]).encode()
    channel.send(frame)
while arguments.deaf:
    time.sleep(1)
"""

PARENT = """
import asyncio
from bottega.process.child import ChildProcess

async def main():
    child = await ChildProcess.start("echo_child")
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "echo_child.py").write_text(ECHO)
    return str(tmp_path)


async def ask(child: ChildProcess, frame: bytes) -> bytes | None:
    await asyncio.wait_for(child.channel.send(frame), 20)
    return await asyncio.wait_for(child.channel.recv(), 20)


async def test_a_child_echoes_and_exits_when_the_pipe_closes(path: str) -> None:
    child = await ChildProcess.start(
        "echo_child", env={"PYTHONPATH": path, "TINT": "ultramarine"}, limits={resource.RLIMIT_AS: 2**30}
    )
    assert await ask(child, b"hello") == b"hello"
    assert await ask(child, b"env") == b"ultramarine"
    assert await ask(child, b"limit") == str(2**30).encode()
    assert os.getsid(child.pid) == child.pid
    assert await child.stop(grace_s=5) == 0
    assert not psutil.pid_exists(child.pid)


async def test_the_death_of_a_child_is_noticed(path: str) -> None:
    child = await ChildProcess.start("echo_child", env={"PYTHONPATH": path})
    assert await ask(child, b"alive") == b"alive"
    notice = asyncio.create_task(child.wait())
    receiving = asyncio.create_task(child.channel.recv())
    os.kill(child.pid, signal.SIGKILL)
    assert await asyncio.wait_for(notice, 20) == -signal.SIGKILL
    assert await asyncio.wait_for(receiving, 20) is None
    with pytest.raises(Unavailable):
        await child.channel.send(b"x")
    assert await child.stop(grace_s=1) == -signal.SIGKILL


async def test_a_child_that_does_not_stop_is_killed_after_the_grace(path: str) -> None:
    child = await ChildProcess.start("echo_child", "--deaf", env={"PYTHONPATH": path})
    assert await ask(child, b"alive") == b"alive"
    began = time.monotonic()
    assert await child.stop(grace_s=0.3) == -signal.SIGKILL
    assert time.monotonic() - began >= 0.3


def test_a_child_exits_when_its_parent_is_killed(path: str) -> None:
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _alive = psutil.wait_procs([child], timeout=30)
    assert gone == [child]


@pytest.mark.parametrize(
    ("script", "stood_still"), [("while True: pass", False), ("import time; time.sleep(60)", True)]
)
def test_a_process_that_works_is_told_from_one_that_stands_still(script: str, *, stood_still: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        spent = CpuTime(process.pid)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and spent.spent_s() < 0.5 and not stood_still:
            time.sleep(0.01)
        assert spent.stood_still(0.9) is stood_still
        process.kill()
        process.wait(5)
    assert spent.stood_still(0.9), "nothing is known of one that is gone"


def environment_of(pid: int | None) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


@pytest.mark.parametrize("exclusive", [False, True])
async def test_threads_wait_asleep_unless_the_cores_are_the_engine_s_alone(
    exclusive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.setenv("GOMP_SPINCOUNT", "9999999")
    config = EngineConfig(exclusive_cores=exclusive)
    timeouts = EngineTimeouts(start_stall_s=20, hang_s=10, stall_s=10)
    engine = WorkerEngineClient(config, timeouts=timeouts, module="tests.fakes.scripted_engine")
    await engine.spawn()
    try:
        said = environment_of(engine.pid)
    finally:
        await engine.stop()
    assert b"OMP_WAIT_POLICY=PASSIVE" in said
    (turns,) = [int(each.partition(b"=")[2]) for each in said if each.startswith(b"GOMP_SPINCOUNT=")]
    assert (0 < turns <= 100_000) == exclusive
    assert exclusive or turns == 0


SPEC = ProcessSpec(name="test process", module="bottega.codec.process", deadline_s=20)


def pool(*, new_process: bool) -> ProcessPool:
    limits = PoolLimits(processes=1, max_waiting=4, limit="calls", waiting="calls wait", new_process=new_process)
    return ProcessPool(SPEC, limits)


@pytest.fixture
def no_new_child() -> Callable[[], None]:
    """Says that no process was begun since the test did; shared suites of other tests may have some that stay."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def check() -> None:
        assert [child for child in psutil.Process().children(recursive=True) if child.pid not in before] == []

    return check


async def _turns(number: int) -> None:
    """The event loop runs whatever is due so many times."""
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("new_process", [False, True])
@pytest.mark.parametrize(
    "until_stop",
    [lambda: _turns(1), lambda: _turns(2), lambda: asyncio.sleep(0.02)],
    ids=["before it runs", "while it is prepared", "while its process starts"],
)
async def test_a_call_that_begins_while_the_pool_stops_is_refused_and_leaves_no_process(
    until_stop: Callable[[], asyncio.Future[None]], new_process: bool, no_new_child: Callable[[], None]
) -> None:
    async def prepare() -> PreparedCall:
        await asyncio.sleep(0.01)
        return PreparedCall(frame=b"")

    stopping = pool(new_process=new_process)
    call = asyncio.create_task(stopping.call(prepare))
    await until_stop()
    await stopping.stop()
    await asyncio.sleep(0.05)  # in which one that was not ended would start its process
    no_new_child()
    with pytest.raises(Unavailable, match="stopping"):
        await asyncio.wait_for(call, 30)


async def test_a_pool_that_stops_while_it_starts_leaves_no_process(no_new_child: Callable[[], None]) -> None:
    stopping = pool(new_process=False)
    starting = asyncio.create_task(stopping.start())
    await asyncio.sleep(0.01)
    await stopping.stop()
    with pytest.raises(Unavailable, match="stopping"):
        await asyncio.wait_for(starting, 30)
    no_new_child()
