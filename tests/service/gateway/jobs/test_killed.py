"""Gateways that are killed: nothing that was acknowledged is lost, and nothing is drawn twice to an end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from bottega.gateway.jobs.store import JobRecord, SqliteJobStore
from bottega.rpc.security.tenant_file import new_webhook_secret
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Techniques
from tests.chaos.webhooks import failing, webhooks_config
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.gateway_process import GatewayProcess
from tests.support.processor_speed import on_this_machine
from tests.support.services import Services
from tests.support.waiting import eventually
from tests.support.webhook_receiver import receiving

# Of processor time.
READY_S = 3.0


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[GatewayProcess]:
    with Services(tmp_path) as services:
        house = GatewayProcess(services, tmp_path, codec_processes=1, max_queued=2000)
        await house.start()
        yield house
        await house.close()


@pytest.fixture
async def worker(house: GatewayProcess) -> AsyncIterator[ScriptedWorker]:
    worker = await ScriptedWorker("w1", house.fleet).start()
    yield worker
    await worker.die()


async def test_a_worker_brings_what_it_runs_to_the_gateway_that_comes_back(
    house: GatewayProcess, worker: ScriptedWorker
) -> None:
    worker.script.hold_at = 5
    job_id = await house.submit("order-1")
    await worker.arrived.wait()
    queued = await house.submit("order-2")
    await house.kill()
    worker.script.release.set()
    await house.start()
    for ended in (await house.ended(job_id), await house.ended(queued)):
        assert (ended.state, ended.provenance.attempts) == (image_pb2.JOB_STATE_COMPLETED, 1)
    assert len(worker.begun) == 2
    assert len(worker.requests) == 3, "it was attached to once"
    assert await house.submit("order-1") == job_id


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
async def test_what_is_answered_from_a_stored_result_is_whole_or_not_there_when_the_gateway_dies(
    house: GatewayProcess, worker: ScriptedWorker, kills: int
) -> None:
    """At any moment between looking for the result and telling the caller that the job is stored."""
    asked = Techniques(identical_results=True)
    source = await house.ended(await house.submit("", seed=7))
    rng = random.Random(3)
    told = 0
    for kill in range(kills):
        names = [f"order-{kill}-{number}" for number in range(40)]
        calls = [asyncio.ensure_future(house.submit(name, seed=7, techniques=asked)) for name in names]
        await asyncio.wait([calls[rng.randrange(20)]])
        await asyncio.sleep(rng.uniform(0, 0.004))
        await house.kill()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await house.start()
        await eventually(house.knows_a_model, "the worker to have joined again")
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, str):
                told += 1
                assert await house.submit(name, seed=7, techniques=asked) == answer
        for job_id in [await house.submit(name, seed=7, techniques=asked) for name in names]:
            job = await house.ended(job_id)
            assert (job.state, job.provenance.identical_job) == (image_pb2.JOB_STATE_COMPLETED, source.job_id)
            assert list(job.images) == list(source.images)
    assert told > 0
    assert len(worker.requests) == 1, "nothing was drawn again"


async def test_a_thousand_live_jobs_are_ready_again_within_three_seconds(house: GatewayProcess) -> None:
    await house.kill()
    store = SqliteJobStore(house.state / "jobs.sqlite")
    await store.open()
    spec = GenerationSpec(model="miniature", prompt="a star", num_inference_steps=10, num_images=1)
    spec.width = spec.height = 64
    image = GenerationSpec()
    image.CopyFrom(spec)
    image.image = bytes(20_000)
    await asyncio.gather(
        *(
            store.add(
                JobRecord(
                    job_id=f"{number:024x}",
                    fingerprint="f",
                    spec=spec.SerializeToString(),
                    shape=(16, 16),
                    created_wall=time.time(),
                    size_bytes=20_100,
                ),
                inputs=image.SerializeToString(),
            )
            for number in range(1000)
        )
    )
    await store.close()
    await house.start()
    used = psutil.Process(house.process.pid).cpu_times()
    assert used.user + used.system < on_this_machine(READY_S)
    assert house.service is not None
    (restored,) = [line for line in house.service.events() if line["event"] == "jobs restored"]
    assert restored["jobs"] == 1000


async def test_every_end_is_announced_although_gateway_and_receiver_fail(tmp_path: Path) -> None:
    secret, rng = new_webhook_secret(), random.Random(1)
    async with receiving(secret) as receiver:
        receiver.answer = failing(rng)
        with Services(tmp_path) as services:
            house = GatewayProcess(services, tmp_path, webhooks=webhooks_config(tmp_path, secret))
            await house.start()
            worker = await ScriptedWorker("w1", house.fleet).start()
            await eventually(house.knows_a_model)
            webhook = image_pb2.Webhook(url=receiver.url)
            jobs = {await house.submit(f"order-{number}", webhook=webhook) for number in range(20)}
            await eventually(lambda: bool(receiver.deliveries))
            await house.kill()
            await house.start()
            await eventually(lambda: {delivery.data["job_id"] for delivery in receiver.accepted} == jobs)
            await worker.die()
            await house.close()
    assert {delivery.event_id for delivery in receiver.deliveries} == {f"evt_{job_id}" for job_id in jobs}
    assert receiver.refused == 0
