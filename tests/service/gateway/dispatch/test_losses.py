"""What callers see when workers die, fall silent, leave, drain or answer late, and when the gateway stops."""

from __future__ import annotations

import asyncio
import time

from bottega import errors
from bottega.rpc.fleet_membership import FleetMembership
from bottega.v1 import fleet_pb2, image_pb2, worker_pb2
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.cut_cable import laid
from tests.support.running_gateway import Running, refusal, running_gateway, told
from tests.support.waiting import eventually


async def _has_made(house: Running, job: image_pb2.Job, *, steps: int) -> bool:
    return (await house.job(job.job_id)).steps_done >= steps


async def test_a_job_whose_worker_dies_is_taken_up_elsewhere_from_its_checkpoint(house: Running) -> None:
    """But not a picture that is kept for editing: a checkpoint has not the latents of the steps before it."""
    first = await house.worker("w1", hold_at=20, step_s={2: 0.01, 4: 0.01})  # so that it takes both
    keeps = await house.submit(prompt="a star", seed=7, keep_for_editing=True)
    await eventually(lambda: len(first.requests) == 1)
    call = house.generate("order-1", prompt="a star", seed=7)
    job_id = (await told(call)).job_id
    await eventually(lambda: len(first.requests) == 2)
    attempt = worker_pb2.AttemptId(job_id=keeps.job_id, number=1)
    await first.checkpoints.put(worker_pb2.WatchCheckpointsResponse(attempt=attempt, steps_done=15, checkpoint=b"15"))
    await house.until_checkpoint(first, job_id)  # which comes after the other one
    second = await house.worker("w2")
    await first.die()
    completed = [answer.event async for answer in call][-1].completed
    assert [image.data for image in completed.images] == [b"picture 0"]
    assert completed.provenance.worker == "w2"
    assert (completed.provenance.attempts, completed.provenance.repeated_steps) == (2, 5)
    ended = await house.ended(keeps.job_id)
    assert (ended.provenance.worker, ended.provenance.repeated_steps) == ("w2", 20)
    again = {request.attempt.job_id: request for request in second.requests}
    assert [again[each].checkpoint for each in (job_id, keeps.job_id)] == [b"15", b""]
    assert {(request.attempt.number, request.spec.seed) for request in second.requests} == {(2, 7)}


async def test_a_connection_that_breaks_while_its_worker_lives_is_nobodys_death(house: Running) -> None:
    worker = ScriptedWorker("w1", house.fleet_address)
    house.workers.append(worker)
    await worker.listen()
    async with laid(worker.address) as cable:
        await worker.join(cable.address)
        worker.script.hold_at = 3
        job = await house.submit(prompt="a star")
        for number in (1, 2):
            await eventually(lambda number=number: len(worker.requests) == number)  # type: ignore[misc]
            await eventually(lambda: _has_made(house, job, steps=3))
            cable.cut()
        worker.script.release.set()
        ended = await house.ended(job.job_id)
    assert ended.state == image_pb2.JOB_STATE_COMPLETED, "two deaths would have made it a poison pill"
    assert ended.provenance.attempts == 3


async def test_a_job_is_not_lost_on_a_worker_that_has_another_model_by_now(house: Running) -> None:
    changed = await house.worker("w1")
    changed.script.failure = errors.ModelNotFound("no such model; served: other", metadata={"served": "other"})
    job = await house.submit(prompt="a star")
    await changed.arrived.wait()
    await house.worker("w2")
    ended = await house.ended(job.job_id)
    assert (ended.state, ended.provenance.worker) == (image_pb2.JOB_STATE_COMPLETED, "w2")


async def test_a_failed_order_whose_failure_asks_for_a_retry_is_drawn_when_it_comes_again() -> None:
    async with running_gateway(max_attempts=1) as house:
        worker = await house.worker("w1")
        worker.script.failure = errors.WorkerLost("it gave up")
        call = house.generate("order-1", prompt="a star")
        first = (await told(call)).job_id
        await refusal(lambda: call, errors.WorkerLost)
        worker.script.failure = None
        again = house.generate("order-1", prompt="a star")
        events = [answer.event async for answer in again]
        assert events[-1].WhichOneof("event") == "completed"
        assert events[-1].job_id != first


async def test_a_job_waits_for_a_worker_only_as_long_as_the_grace() -> None:
    async with running_gateway(model_grace_s=1.0) as house:
        worker = await house.worker()
        await worker.die()
        call = house.generate("order-1", prompt="a star")
        assert (await told(call)).WhichOneof("event") == "queued"
        await refusal(lambda: call, errors.NoWorker)
        error = await refusal(lambda: house.generate(prompt="another"), errors.NoWorker)
        assert error.retry_after_s


async def test_a_worker_that_does_not_answer_as_one_is_lost_and_no_word_of_its_library_is_told() -> None:
    async with running_gateway(max_attempts=2) as house:
        registration = ScriptedWorker("odd", house.fleet_address).registration()
        registration.address = house.address  # a service, but no worker: gRPC itself answers there
        membership = FleetMembership(house.fleet_address, registration, load=lambda: fleet_pb2.Load(max_rows=16))
        membership.start()
        await membership.joined.wait()
        error = await refusal(lambda: house.generate(prompt="a star"), errors.WorkerLost)
        assert error.message == "2 workers were lost while they ran this job beside others"
        await membership.stop()


async def test_a_service_that_joins_and_says_nothing_is_sent_away() -> None:
    async with running_gateway(lease_s=0.3) as house:
        call = house.fleet.Join()
        error = await refusal(lambda: call)
        assert isinstance(error, errors.DeadlinePassed)


async def test_streams_that_say_nothing_do_not_hold_up_a_stopping_gateway() -> None:
    async with running_gateway(lease_s=60, drain_grace_s=100.0) as house:
        calls = [house.fleet.Join() for _ in range(3)]
        for call in calls:
            await call.wait_for_connection()
        member = await house.worker()
        began = time.monotonic()
        await house.gateway.server.drain(house.gateway.finish)
        assert time.monotonic() - began < 50.0
        for call in calls:
            assert isinstance(await refusal(lambda call=call: call), errors.Draining)  # type: ignore[misc]
        assert not member.membership or not member.membership.joined.is_set()


async def test_a_stopping_gateway_finishes_what_runs_and_refuses_what_waits_and_what_comes(house: Running) -> None:
    worker = await house.worker(hold_at=5)
    runs = house.generate("order-1", prompt="a star")
    await told(runs)
    await worker.arrived.wait()
    waits = house.generate("order-2", prompt="a square")
    assert (await told(waits)).WhichOneof("event") == "queued"
    stopping = asyncio.create_task(house.gateway.server.drain(house.gateway.finish))
    await refusal(lambda: waits, errors.Draining)
    await refusal(lambda: house.generate(prompt="another"), errors.Draining)
    assert not stopping.done()
    worker.script.release.set()
    assert [answer.event async for answer in runs][-1].WhichOneof("event") == "completed"
    await stopping
