"""A gateway whose job store or folder of images is deleted, replaced or truncated while it serves."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from bottega.v1 import image_pb2
from tests.support import lost_files
from tests.support.running_gateway import Running, running_gateway
from tests.support.waiting import eventually


async def _submit_twenty(house: Running) -> list[str]:
    """Submits jobs, each until it is taken; the ids of those that were acknowledged."""
    acknowledged: list[str] = []
    for number in range(20):
        while len(acknowledged) == number:
            try:
                acknowledged.append((await house.submit(f"later-{number}", prompt="a star")).job_id)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)
    return acknowledged


# store/test_lost_files.py loses files in every way.
@pytest.mark.parametrize("lose", [lost_files.unlink_all, lost_files.truncate_all])
async def test_no_job_is_acknowledged_in_vain_when_the_job_store_goes(
    tmp_path: Path, lose: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    state = tmp_path / "state"
    async with running_gateway(state=str(state)) as house:
        await (await house.worker(hold_at=5)).die()
        acknowledged = [(await house.submit(f"before-{number}", prompt="a star")).job_id for number in range(5)]
        lose(state / "jobs.sqlite")
        acknowledged += await _submit_twenty(house)
        assert any("file was moved or deleted" in line.message for line in caplog.records if line.levelname == "ERROR")
        await house.until_serving()
        await house.stop_early()
    async with running_gateway(state=str(state)) as house:
        for job_id in acknowledged:
            await house.job(job_id)
        await house.worker()
        for job_id in acknowledged:
            assert (await house.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_health_says_that_the_job_store_has_gone_though_nobody_calls(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path)) as house:
        worker = await house.worker(hold_at=5)
        running = await house.submit("order-1", prompt="a star")
        await worker.arrived.wait()
        lost_files.truncate_all(tmp_path / "jobs.sqlite")
        await house.until_serving(False)
        await house.until_serving()
        worker.script.release.set()
        assert (await house.ended(running.job_id)).state == image_pb2.JOB_STATE_COMPLETED
    async with running_gateway(state=str(tmp_path)) as house:
        assert (await house.job(running.job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_the_folder_of_images_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_gateway(state=str(tmp_path)) as house:
        await house.worker()
        first = await house.submit("order-1", prompt="a star")
        await house.ended(first.job_id)
        shutil.rmtree(tmp_path / "images")
        second = await house.draw("order-2", prompt="a square")
        assert second.images
        assert await house.is_serving()
        assert (await house.draw("order-1", prompt="a star")).images
        shutil.rmtree(tmp_path / "images")  # an idle gateway notices as well
        await eventually(lambda: (tmp_path / "images" / "incoming").is_dir())
    told = [line.message for line in caplog.records if line.levelname == "ERROR"]
    assert set(told) == {"the folder of images was deleted; it is created again"}
