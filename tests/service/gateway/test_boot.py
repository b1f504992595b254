"""The gateway as a process: it says where it serves, refuses what it cannot use, and ends when told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from bottega.rpc.channel import open_channel
from bottega.v1 import fleet_pb2, fleet_pb2_grpc

FREE_PORTS = (
    "server: {listen: 127.0.0.1:0, metrics_listen: 127.0.0.1:0, drain_grace_s: 2}\nfleet: {listen: 127.0.0.1:0}\n"
)


async def _start(tmp_path: Path, config: str, *options: str) -> asyncio.subprocess.Process:
    file = tmp_path / "gateway.yaml"
    file.write_text(config)
    command = [sys.executable, "-m", "bottega.gateway", "--config", str(file), *options]
    pipe = asyncio.subprocess.PIPE
    env = {**os.environ, "BOTTEGA_STATE": str(tmp_path / "state")}
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stderr=pipe, env=env)


async def test_a_gateway_serves_and_ends_on_sigterm_with_its_codec_processes(tmp_path: Path) -> None:
    process = await _start(tmp_path, FREE_PORTS)
    assert process.stderr is not None
    line = json.loads(await asyncio.wait_for(process.stderr.readline(), 20))
    assert (line["event"], line["service"]) == ("serving", "gateway")
    async with open_channel(line["fleet"]) as channel:
        fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
        members = (await fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=5)).members
    assert [member.registration.address for member in members] == [line["address"]]
    process.send_signal(signal.SIGTERM)
    # stderr ends when the last process that holds it has gone.
    await asyncio.wait_for(process.stderr.read(), 10)
    assert await process.wait() == 0


async def test_a_gateway_that_is_to_stop_with_its_stdin_does(tmp_path: Path) -> None:
    process = await _start(tmp_path, FREE_PORTS, "--stop-with-stdin")
    assert process.stdin is not None
    assert process.stderr is not None
    assert json.loads(await asyncio.wait_for(process.stderr.readline(), 20))["event"] == "serving"
    process.stdin.write(b"what it hears is of no matter")
    await process.stdin.drain()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.5)
    process.stdin.close()
    said = await asyncio.wait_for(process.stderr.read(), 10)
    assert json.loads(said.splitlines()[-1])["event"] == "stopped"
    assert await process.wait() == 0


async def test_without_being_told_a_gateway_outlives_its_stdin(tmp_path: Path) -> None:
    process = await _start(tmp_path, FREE_PORTS)
    assert process.stdin is not None
    assert process.stderr is not None
    await asyncio.wait_for(process.stderr.readline(), 20)
    process.stdin.close()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(process.wait(), 0.5)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 10) == 0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ("max_quoued: 3\n", "max_quoued"),
        ("lease_s: soon\n", "lease_s"),
        ("lease_s: -1\n", "lease_s"),
        ("server: {log_level: loud}\n", "server.log_level"),
        ("server: {listen: nowhere}\n", "nowhere"),
    ],
)
async def test_a_configuration_that_cannot_be_used_is_named(tmp_path: Path, config: str, named: str) -> None:
    process = await _start(tmp_path, config)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    last = stderr.decode()
    assert named in last
    assert "Traceback" not in last
