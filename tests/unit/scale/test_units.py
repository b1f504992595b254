"""What a scaler asks of systemd, which a script stands for, as it does not run in containers."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from bottega.client.suite.plan import ProcessPlan
from bottega.errors import ConfigError, Unavailable
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.scale.config import PoolConfig, ScaleConfig
from bottega.scale.pools import UnitState
from bottega.scale.service import Scaler
from bottega.scale.units import ProcessUnits, SystemdUnits
from bottega.v1.fleet_pb2 import PoolTarget
from tests.support.waiting import eventually

A, B = "bottega-worker@a.service", "bottega-worker@b.service"
# It keeps the state of a unit in a file of its name, and prints what systemctl show prints.
SCRIPT = """#!/bin/sh
cd "$(dirname "$0")"
verb=$1
while [ "$1" != -- ]; do shift; done
shift
case $verb in
show) for unit in "$@"; do echo "Id=$unit"; cat "$unit"; echo; done ;;
start) echo start >>"log $1"; printf 'LoadState=loaded\\nActiveState=activating\\nSubState=start\\n' >"$1" ;;
stop) [ ! -e refuse ] || { echo 'Failed to stop: Access denied' >&2; exit 4; }
      printf 'LoadState=loaded\\nActiveState=deactivating\\nSubState=stop\\n' >"$1" ;;
esac
"""


async def test_a_unit_is_idle_if_the_gateway_says_so_of_its_service(systemd: Path, tmp_path: Path) -> None:
    (systemd / A).write_text("LoadState=loaded\nActiveState=active\nMainPID=41\n")
    (systemd / B).write_text("LoadState=loaded\nActiveState=active\nMainPID=42\n")
    workers = tmp_path / "workers"
    workers.mkdir()
    (workers / "a.yaml").write_text("name: first\n")
    (workers / "b.yaml").write_text("model: m\n")
    units = SystemdUnits(str(systemd / "systemctl"))
    await units.states([A, B])
    assert units.pids == {A: 41, B: 42}
    config = ScaleConfig(folder=str(tmp_path), pools=(PoolConfig(model="m", instances=("a", "b")),))
    scaler = Scaler(config, Server("scale", ServerConfig()), units)
    (pool,) = scaler._pools
    for name, idle in (
        ("first", A),
        (f"worker-{socket.gethostname()}-42", B),
        ("worker-elsewhere-42", None),
        ("worker-42", None),
    ):
        scaler._note_targets([PoolTarget(kind="worker", model="m", count=1, idle=[name])])
        assert [unit for unit in (A, B) if scaler._is_idle(pool, unit)] == ([idle] if idle else [])
    (workers / "a.yaml").write_text("name: other\n")
    os.utime(workers / "a.yaml", ns=(1, 1))
    scaler._note_targets([PoolTarget(kind="worker", model="m", count=1, idle=["other"])])
    assert scaler._is_idle(pool, A), "its configuration was changed"
    (workers / "a.yaml").write_text("name: not read\n")
    os.utime(workers / "a.yaml", ns=(1, 1))
    assert scaler._is_idle(pool, A)


@pytest.fixture
def systemd(tmp_path: Path) -> Path:
    (tmp_path / "systemctl").write_text(SCRIPT)
    (tmp_path / "systemctl").chmod(0o755)
    for unit in (A, B):
        say(tmp_path, unit, "inactive", "dead")
    return tmp_path


def say(systemd: Path, unit: str, active: str, sub: str, loaded: str = "loaded") -> None:
    (systemd / unit).write_text(f"LoadState={loaded}\nActiveState={active}\nSubState={sub}\n")


async def test_units_of_systemd_start_and_stop(systemd: Path) -> None:
    units = SystemdUnits(str(systemd / "systemctl"))
    assert await units.states([A, B]) == {A: UnitState.STOPPED, B: UnitState.STOPPED}
    await units.start(A)
    assert await units.states([A, B]) == {A: UnitState.STARTING, B: UnitState.STOPPED}
    say(systemd, A, "active", "running")
    say(systemd, B, "activating", "auto-restart")
    assert await units.states([A, B]) == {A: UnitState.READY, B: UnitState.RESTARTING}
    await units.stop(A)
    say(systemd, B, "failed", "failed")
    assert await units.states([A, B]) == {A: UnitState.STOPPING, B: UnitState.FAILED}
    say(systemd, B, "failed", "failed\nJob=12")
    assert (await units.states([B]))[B] is UnitState.STARTING, "its next start is queued"


async def test_what_is_wrong_with_systemd_is_told_by_its_name_and_in_its_words(systemd: Path) -> None:
    say(systemd, B, "inactive", "dead", loaded="not-found")
    with pytest.raises(ConfigError, match=B):
        await SystemdUnits(str(systemd / "systemctl")).states([A, B])
    (systemd / "refuse").touch()
    with pytest.raises(Unavailable, match=f"systemctl stop {A}: .*Access denied"):
        await SystemdUnits(str(systemd / "systemctl")).stop(A)
    with pytest.raises(ConfigError, match="manager: processes"):
        await SystemdUnits("/nowhere/systemctl").states([A])


def plan(code: str, *arguments: str) -> ProcessPlan:
    return ProcessPlan(name="a", argv=(sys.executable, "-c", code, *arguments))


# It serves and ends when the test allows it by a file in its folder.
CHILD = """
import json, pathlib, signal, sys, time
def wait_for(name):
    while not pathlib.Path(sys.argv[1], name).exists():
        time.sleep(0.01)
def drain(*_):
    wait_for("end")
    pathlib.Path(sys.argv[1], "drained").touch()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, drain)
wait_for("serve")
print(json.dumps({"event": "serving", "address": "x"}), flush=True)
while True:
    signal.pause()
"""


async def test_a_child_process_that_drains_is_not_killed(tmp_path: Path) -> None:
    units = ProcessUnits({A: plan(CHILD, str(tmp_path))}, tmp_path)
    assert await units.states([A]) == {A: UnitState.STOPPED}
    await units.start(A)
    assert await units.states([A]) == {A: UnitState.STARTING}
    (tmp_path / "serve").touch()
    await eventually(lambda: _is(units, UnitState.READY))
    await units.stop(A)
    assert await units.states([A]) == {A: UnitState.STOPPING}
    (tmp_path / "end").touch()
    await eventually(lambda: _is(units, UnitState.STOPPED))
    assert (tmp_path / "drained").exists()
    await units.start(A)
    await eventually(lambda: _is(units, UnitState.READY))
    await units.close()
    assert await units.states([A]) == {A: UnitState.STOPPED}
    children = psutil.Process().children(recursive=True)
    assert not [process.pid for process in children if str(tmp_path) in process.cmdline()]


async def test_a_child_process_that_cannot_start_has_failed(tmp_path: Path) -> None:
    units = ProcessUnits({A: plan("import sys; sys.exit(2)")}, tmp_path)
    await units.start(A)
    await eventually(lambda: _is(units, UnitState.FAILED))
    assert await units.states([A]) == {A: UnitState.STOPPED}
    await units.close()


async def _is(units: ProcessUnits, state: UnitState) -> bool:
    return (await units.states([A]))[A] is state
