"""A gateway, a scaler and the workers that it starts as processes: a burst, and the rest after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from bottega import errors
from bottega.client.suite.plan import ProcessPlan
from bottega.gateway.config import ScalingConfig
from bottega.rpc.server import Server
from bottega.rpc.server_config import ServerConfig
from bottega.scale.config import PoolConfig, ScaleConfig
from bottega.scale.service import Scaler
from bottega.scale.units import ProcessUnits
from bottega.v1 import fleet_pb2, image_pb2
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.waiting import eventually

MODEL = "miniature"
SCALING = ScalingConfig(wait_s=1.0, keep_s=1.5, start_s=1.0)
STEP_S, STEPS = 0.02, 25


@contextlib.asynccontextmanager
async def scaling(house: Running, folder: Path, *, minimum: int, broken: bool = False) -> AsyncIterator[Server]:
    """Run a scaler of two workers while the block runs. The first of them may be unable to start."""
    (folder / "workers").mkdir(parents=True)
    plans = {}
    pool = PoolConfig(model=MODEL, minimum=minimum, instances=("a", "b"))
    for name in pool.instances:
        path = folder / "workers" / f"{name}.yaml"
        worker = {"name": name, "gateway": house.fleet_address, "step_s": STEP_S}
        path.write_text(json.dumps({"unknown": 1} if broken and name == "a" else worker))
        argv = (sys.executable, "-m", "tests.fakes.scripted_worker_process", "--config", str(path), "--stop-with-stdin")
        plans[pool.unit(name)] = ProcessPlan(name=name, argv=argv)
    # 600 s: a worker that could not start is not started again, however long the test takes.
    config = ScaleConfig(
        name="host", gateway=house.fleet_address, folder=str(folder), pools=(pool,), first_retry_s=600, max_retry_s=600
    )
    server = Server("scale", ServerConfig(drain_grace_s=0.1))
    scaler = Scaler(config, server, ProcessUnits(plans, folder))
    await server.start()
    try:
        await scaler.start()
        yield server
    finally:
        await server.stop()
        await scaler.stop()


async def workers(house: Running) -> list[str]:
    """Return the names of the workers that accept jobs."""
    members = (await house.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=5)).members
    found = (member for member in members if member.registration.kind == "worker" and member.registration.models)
    return [member.registration.name for member in found if not member.load.draining]


async def submit(house: Running, number: int) -> str:
    return (await house.submit(prompt=f"a star {number}", model=MODEL, num_inference_steps=STEPS, seed=number)).job_id


async def test_a_burst_starts_a_second_worker_which_drains_away_after_it(tmp_path: Path) -> None:
    async with running_gateway(scaling=SCALING, model_grace_s=1.0) as house, scaling(house, tmp_path, minimum=1):

        async def are(*names: str) -> bool:
            return await workers(house) == list(names)

        await eventually(lambda: are("a"))
        jobs: list[str] = []
        while not await are("a", "b"):  # for as long as the other one starts, more wait than one draws in time
            if len(list(house.gateway._jobs.live())) < 8:
                jobs.append(await submit(house, len(jobs)))
            await asyncio.sleep(0.1)
        jobs += [await submit(house, 5_000 + number) for number in range(4)]
        ended = [await house.ended(job) for job in jobs]
        assert {job.state for job in ended} == {image_pb2.JOB_STATE_COMPLETED}
        assert {job.provenance.worker for job in ended} == {"a", "b"}
        late: list[str] = []
        while len(await workers(house)) > 1:  # while it is taken away, jobs keep coming
            late.append(await submit(house, 10_000 + len(late)))
            await asyncio.sleep(3.0)
        ended = [await house.ended(job) for job in late]
        assert {job.state for job in ended} == {image_pb2.JOB_STATE_COMPLETED}


async def test_the_first_job_of_a_model_starts_a_worker_and_another_if_that_cannot_start(tmp_path: Path) -> None:
    async with (
        running_gateway(scaling=SCALING, model_grace_s=1.0) as house,
        scaling(house, tmp_path, minimum=0, broken=True) as server,
    ):

        async def is_offered() -> bool:
            error = await refusal(lambda: house.submit(prompt="a star", model=MODEL))
            return isinstance(error, errors.NoWorker) and "is being started" in error.message

        async def are(*names: str) -> bool:
            return await workers(house) == list(names)

        await eventually(is_offered)
        await eventually(lambda: are("b"))
        labels = {"kind": "worker", "model": MODEL}
        assert server.registry.get_sample_value("bottega_scale_failed_starts_total", labels) == 1
        job = await house.ended(await submit(house, 1))
        assert job.state == image_pb2.JOB_STATE_COMPLETED
        await eventually(lambda: are())
        again = await house.ended(await submit(house, 2))
        assert again.state == image_pb2.JOB_STATE_COMPLETED, "its features are known now, so it waits for a start"
