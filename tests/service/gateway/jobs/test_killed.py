"""Gateways that are killed: nothing that was acknowledged is lost, and nothing is drawn twice to an end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bottega.client.suite.plan import free_ports
from bottega.gateway.jobs.store import JobRecord, SqliteJobStore
from bottega.rpc.channel import open_channel
from bottega.rpc.security.tenant_file import new_webhook_secret
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec, Techniques
from tests.chaos.webhooks import failing, webhooks_config
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.services import Service, Services, gateway_config
from tests.support.waiting import eventually
from tests.support.webhook_receiver import Receiver, receiving

READY_S = 3.0


class House:
    """A gateway in a process of its own, always at the same place and with the same state, and a worker here."""

    def __init__(self, services: Services, folder: Path, **config: object) -> None:
        self._services = services
        self._config = config
        self.state = folder / "state"
        self.address, self.fleet = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.gateway: Service | None = None
        self.channel = open_channel(self.address)
        self.images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(self.channel)
        self.worker = ScriptedWorker("w1", self.fleet)

    async def start(self) -> None:
        server = {"listen": self.address, "metrics_listen": "127.0.0.1:0"}
        config = gateway_config(
            server=server,
            fleet={"listen": self.fleet},
            state=str(self.state),
            codec_processes=1,
            max_queued=2000,
            **self._config,
        )
        self.gateway = await asyncio.to_thread(self._services.start, "gateway", config, name="gateway")

    async def kill(self) -> None:
        assert self.gateway is not None
        self.gateway.process.kill()  # now, and not when a thread is free
        await asyncio.to_thread(self.gateway.kill)

    async def submit(self, request_id: str, *, webhook: image_pb2.Webhook | None = None, **spec: Any) -> str:
        request = image_pb2.SubmitJobRequest(
            request_id=request_id, spec=GenerationSpec(prompt="a star", **spec), webhook=webhook
        )
        return (await self.images.SubmitJob(request, timeout=10)).job.job_id

    async def knows_a_model(self) -> bool:
        """Before a worker has said which weights a model has, it is not certain what a request would be drawn with."""
        return bool((await self.images.ListModels(image_pb2.ListModelsRequest(), timeout=10)).models)

    async def ended(self, job_id: str) -> image_pb2.Job:
        async with asyncio.timeout(20):
            while True:
                job = (await self.images.GetJob(image_pb2.GetJobRequest(job_id=job_id), wait_for_ready=True)).job
                if job.HasField("end_time"):
                    return job
                await asyncio.sleep(0.05)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    with Services(tmp_path) as services:
        house = House(services, tmp_path)
        await house.start()
        await house.worker.start()
        yield house
        await house.worker.die()
        await house.channel.close()


async def test_a_worker_brings_what_it_runs_to_the_gateway_that_comes_back(house: House) -> None:
    house.worker.script.hold_at = 5
    job_id = await house.submit("order-1")
    await asyncio.wait_for(house.worker.arrived.wait(), 2)
    queued = await house.submit("order-2")
    await house.kill()
    house.worker.script.release.set()
    await house.start()
    for ended in (await house.ended(job_id), await house.ended(queued)):
        assert (ended.state, ended.provenance.attempts) == (image_pb2.JOB_STATE_COMPLETED, 1)
    assert len(house.worker.begun) == 2
    assert len(house.worker.requests) == 3, "it was attached to once"
    assert await house.submit("order-1") == job_id


@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.slow)])
async def test_what_is_answered_from_a_stored_result_is_whole_or_not_there_when_the_gateway_dies(
    house: House, kills: int
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
    assert len(house.worker.requests) == 1, "nothing was drawn again"


@pytest.mark.alone
async def test_a_thousand_live_jobs_are_ready_again_within_three_seconds(house: House) -> None:
    await house.worker.die()
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
    began = time.monotonic()
    await house.start()
    seconds = time.monotonic() - began
    assert seconds < READY_S
    assert house.gateway is not None
    (restored,) = [line for line in house.gateway.events() if line["event"] == "jobs restored"]
    assert restored["jobs"] == 1000
    assert restored["seconds"] < 1.0


async def test_every_end_is_announced_although_gateway_and_receiver_fail(tmp_path: Path) -> None:
    secret, rng = new_webhook_secret(), random.Random(1)
    config = webhooks_config(tmp_path, secret)
    async with receiving(secret) as receiver:
        receiver.answer = failing(rng)
        with Services(tmp_path) as services:
            house = House(services, tmp_path, webhooks=config)
            await house.start()
            await house.worker.start()
            jobs: set[str] = set()
            for life in range(2):
                await eventually(house.knows_a_model)
                webhook = image_pb2.Webhook(url=receiver.url)
                submitted = [await house.submit(f"order-{life}-{n}", webhook=webhook) for n in range(20)]
                jobs.update(submitted)
                before = len(receiver.deliveries)
                await eventually(partial(_more, receiver, before))
                await house.kill()
                await house.start()
            await eventually(lambda: {delivery.data["job_id"] for delivery in receiver.accepted} == jobs)
            await house.worker.die()
            await house.channel.close()
    assert {delivery.event_id for delivery in receiver.deliveries} == {f"evt_{job_id}" for job_id in jobs}
    assert receiver.refused == 0


def _more(receiver: Receiver, than: int) -> bool:
    return len(receiver.deliveries) > than
