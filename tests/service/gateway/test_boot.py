"""The gateway as a process: it says where it serves, and ends when told."""

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
from tests.support.services import Services, gateway_config


async def test_a_gateway_serves_and_ends_on_sigterm_with_its_codec_processes(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text(json.dumps(gateway_config(codec_idle_s=None)))
    command = [sys.executable, "-m", "bottega.gateway", "--config", str(config)]
    env = {**os.environ, "BOTTEGA_STATE": str(tmp_path / "state")}
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=env)
    assert process.stderr is not None
    line = json.loads(await process.stderr.readline())
    assert (line["event"], line["service"]) == ("serving", "gateway")
    async with open_channel(line["fleet"]) as channel:
        fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(channel)
        members = (await fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=60)).members
    assert [member.registration.address for member in members] == [line["address"]]
    process.send_signal(signal.SIGTERM)
    # stderr ends when the last process that holds it has gone.
    await process.stderr.read()
    assert await process.wait() == 0


def test_a_gateway_whose_state_folder_cannot_be_used_ends_with_a_sentence(tmp_path: Path) -> None:
    state = tmp_path / "file" / "gateway"
    state.parent.write_bytes(b"not a folder")
    with Services(tmp_path) as services, pytest.raises(AssertionError, match="ended with 2 before it served") as ended:
        services.start("gateway", gateway_config(state=str(state)))
    said = str(ended.value)
    assert said.splitlines()[-1].startswith(f"bottega.gateway: state: the folder {state} cannot be used")
    assert "Traceback" not in said
