"""The order of jobs over a restart of the gateway, and a request that its engine dies of among others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bottega import errors
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import PRIORITY_HIGH, PRIORITY_LOW, PRIORITY_NORMAL, PRIORITY_UNSPECIFIED
from tests.support.running_front import CONFIG, running_workers
from tests.support.running_gateway import Running, running_gateway
from tests.support.waiting import eventually

SPEC = GenerationSpec(prompt="a star")


async def _submitted(house: Running, priority: image_pb2.Priority.ValueType) -> str:
    answer = await house.images.SubmitJob(image_pb2.SubmitJobRequest(spec=SPEC, priority=priority))
    assert answer.job.priority == (priority or PRIORITY_NORMAL)
    return answer.job.job_id


async def test_the_more_urgent_job_is_drawn_first_after_a_restart_too(tmp_path: Path) -> None:
    async with running_gateway(state=str(tmp_path), model_grace_s=30) as house:
        worker = await house.worker(hold_at=5)
        await house.submit(prompt="a square")
        low, plain, high = [
            await _submitted(house, priority) for priority in (PRIORITY_LOW, PRIORITY_UNSPECIFIED, PRIORITY_HIGH)
        ]
        await worker.die()
        await house.stop_early()
    async with running_gateway(state=str(tmp_path), hold_s=0.1, model_grace_s=30) as house:
        other = await house.worker("w2")
        for job_id in (low, plain, high):
            assert (await house.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert [job_id for job_id, _ in other.begun if job_id in (low, plain, high)] == [high, plain, low]
        assert (await house.ended(high)).priority == PRIORITY_HIGH


async def _served(house: Running) -> bool:
    return bool((await house.images.ListModels(image_pb2.ListModelsRequest(), timeout=60)).models)


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


async def test_of_four_requests_the_poison_pill_fails_and_three_complete() -> None:
    async with running_gateway() as house, running_workers() as start:
        running = await start(replace(CONFIG, gateway=house.fleet_address))
        await eventually(lambda: _served(house))
        innocent = [await _submit(house, "slow") for _ in range(3)]
        await eventually(lambda: sum(attempt.steps_done > 0 for attempt in running.worker.attempts) == 3)
        pill = await _submit(house, "slow die", "pill")
        ended = await house.ended(pill)
        assert (ended.state, ended.error.reason) == (image_pb2.JOB_STATE_FAILED, errors.Poisoned.reason)
        others = [await house.ended(job_id) for job_id in innocent]
        assert [job.state for job in others] == [image_pb2.JOB_STATE_COMPLETED] * 3
        # Each was beside the poison pill once, and then exclusive until it was further.
        assert all(job.provenance.attempts <= 2 for job in others)
        assert await _submit(house, "slow die", "pill") == pill, "it is not drawn again"
