"""A worker whose model cannot be served tells the fleet so before it ends."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from bottega import kinds
from bottega.client.cli.fleet import fleet_table
from bottega.client.types.fleet import fleet_from
from bottega.errors import ConfigError
from bottega.v1 import fleet_pb2
from tests.samples.model_folders import with_scheduler
from tests.support.running_gateway import running_gateway
from tests.support.services import worker_config


async def run_worker(folder: Path, gateway: str, config: Path) -> tuple[int | None, str]:
    """Return the exit status and the last line of a worker of this model."""
    text = json.dumps(worker_config(gateway, name="gpu-1", engine={"model": str(folder)}))
    await asyncio.to_thread(config.write_text, text)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bottega.worker", "--config", str(config), stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    assert b"Traceback" not in said
    return process.returncode, said.decode().splitlines()[-1]


async def test_the_fleet_shows_which_worker_has_ended_and_why(tmp_path: Path) -> None:
    folder = with_scheduler(tmp_path / "sde", "DPMSolverSDEScheduler")
    async with running_gateway() as house:
        status, last = await run_worker(folder, house.fleet_address, tmp_path / "worker.json")
        fleet = await house.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=5)
    assert status == ConfigError.exit_status
    assert last.startswith(f"bottega.worker: the model {folder} cannot be served: scheduler/scheduler_config.json: ")
    assert [member.registration.kind for member in fleet.members] == [kinds.GATEWAY]
    assert [member.registration.name for member in fleet.refused] == ["gpu-1"]
    caption = str(fleet_table(fleet_from(fleet)).table.caption)
    assert "gpu-1 has ended: the model" in caption
    assert "_class_name must be EulerDiscreteScheduler" in caption


async def test_a_worker_that_finds_no_gateway_ends_all_the_same(tmp_path: Path) -> None:
    folder = with_scheduler(tmp_path / "flow", "FlowMatchEulerDiscreteScheduler")
    status, last = await run_worker(folder, "127.0.0.1:1", tmp_path / "worker.json")
    assert status == ConfigError.exit_status
    assert last.startswith(f"bottega.worker: the model {folder} cannot be served: scheduler/")
