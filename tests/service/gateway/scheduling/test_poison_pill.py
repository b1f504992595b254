"""One request that the engine dies of, among others that it does not: a real gateway and fronts, a scripted engine."""

from __future__ import annotations

from dataclasses import replace

from bottega import errors
from bottega.v1 import generation_pb2, image_pb2
from tests.support.running_front import CONFIG, running_workers
from tests.support.running_gateway import Running, running_gateway
from tests.support.waiting import eventually


async def _served(house: Running) -> bool:
    return bool((await house.images.ListModels(image_pb2.ListModelsRequest(), timeout=5)).models)


async def _submit(house: Running, prompt: str, request_id: str = "") -> str:
    job = await house.submit(
        request_id,
        prompt=prompt,
        num_inference_steps=40,
        guidance_scale=4.0,
        sampler=generation_pb2.SAMPLER_EULER,
        width=64,
        height=64,
        seed=1,
    )
    return job.job_id


async def test_of_eight_requests_the_poison_pill_fails_and_seven_complete() -> None:
    async with running_gateway() as house, running_workers() as start:
        running = await start(replace(CONFIG, gateway=house.fleet_address))
        await eventually(lambda: _served(house))
        innocent = [await _submit(house, "slow") for _ in range(7)]
        await eventually(lambda: sum(attempt.steps_done > 0 for attempt in running.worker.attempts) == 7)
        pill = await _submit(house, "slow dies", "pill")
        ended = await house.ended(pill)
        assert (ended.state, ended.error.reason) == (image_pb2.JOB_STATE_FAILED, errors.Poisoned.reason)
        others = [await house.ended(job_id) for job_id in innocent]
        assert [job.state for job in others] == [image_pb2.JOB_STATE_COMPLETED] * 7
        # Each was beside the poison pill once, and then exclusive until it was further.
        assert all(job.provenance.attempts <= 2 for job in others)
        assert await _submit(house, "slow dies", "pill") == pill, "it is not drawn again"
