"""A worker whose model cannot be served ends at once with one sentence, which the fleet is told too."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bottega import kinds
from bottega.client.cli.fleet import fleet_table
from bottega.client.types.fleet import fleet_from
from bottega.errors import ConfigError
from bottega.v1 import fleet_pb2
from tests.samples.model_folders import with_scheduler
from tests.samples.wrong_folders import WRONG_FOLDERS, WrongFolder
from tests.support.processor_speed import on_this_machine, seconds_of_children
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


# Of processor time, the start of Python and the imports of the front included.
LIMIT_S = 2.0
_GATEWAYS = {"alone": "''", "without its gateway": "127.0.0.1:9"}
# One whose weights are damaged; the checker is the same for all.
_IN_EVERY_RUN = ("a file that is cut off", "without its gateway")


@pytest.mark.parametrize(
    ("wrong", "gateway"),
    [
        pytest.param(
            wrong,
            address,
            marks=() if (wrong.name, gateway) == _IN_EVERY_RUN else pytest.mark.slow,
            id=f"{wrong.name}-{gateway}",
        )
        for wrong in WRONG_FOLDERS
        for gateway, address in _GATEWAYS.items()
    ],
)
def test_a_worker_ends_with_the_sentence(wrong: WrongFolder, gateway: str, tmp_path: Path) -> None:
    given, sentence = wrong.make_at(tmp_path / "model")
    config = tmp_path / "worker.yaml"
    config.write_text(f"gateway: {gateway}\nengine: {{model: '{given}'}}\n")
    command = [sys.executable, "-m", "bottega.worker", "--config", str(config)]
    before_s = seconds_of_children()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    took_s = seconds_of_children() - before_s
    assert done.stderr == f"bottega.worker: the model {given} cannot be served: {sentence}\n"
    assert done.stdout == ""
    assert done.returncode == ConfigError.exit_status  # systemd's units do not start it again
    assert took_s < on_this_machine(LIMIT_S)
