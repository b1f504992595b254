"""How an engine's threads wait is said by the environment of its process, before torch is imported there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.process import EngineTimeouts
from bottega.worker.config import EngineConfig
from bottega.worker.engine_client import WorkerEngineClient


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
