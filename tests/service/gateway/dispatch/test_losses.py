"""What callers see when workers die, fall silent, leave, drain or answer late, and when the gateway stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from bottega import errors
from bottega.rpc.channel import open_channel
from bottega.rpc.fleet_membership import FleetMembership
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, worker_pb2
from tests.fakes.scripted_worker import MODEL, ScriptedWorker
from tests.support.cut_cable import laid
from tests.support.running_gateway import Running, refusal, running_gateway, told


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    async with running_gateway() as running:
        yield running


async def _within(seconds: float, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def _names(house: Running) -> list[str]:
    members = (await house.fleet.ListMembers(fleet_pb2.ListMembersRequest())).members
    return [member.registration.name for member in members[1:]]


class SilentMembership:
    """Joins for a scripted worker and then never says another word, as a stopped process would."""

    def __init__(self, house: Running, worker: ScriptedWorker) -> None:
        self._channel = open_channel(house.fleet_address)
        fleet: fleet_pb2_grpc.FleetServiceAsyncStub = fleet_pb2_grpc.FleetServiceStub(self._channel)
        self._call = fleet.Join()
        self._worker = worker

    async def join(self) -> None:
        await self._call.write(fleet_pb2.JoinRequest(registration=self._worker.registration()))
        await self._call.read()

    async def speak(self) -> None:
        await self._call.write(fleet_pb2.JoinRequest(load=self._worker.load()))

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def test_a_job_whose_worker_dies_is_taken_up_elsewhere_from_its_checkpoint(house: Running) -> None:
    first = await house.worker("w1")
    first.script.hold_at = 20
    call = house.generate("order-1", prompt="a star", seed=7)
    job_id = (await told(call)).job_id
    await asyncio.wait_for(first.arrived.wait(), 2)
    attempt = worker_pb2.AttemptId(job_id=job_id, number=1)
    await first.checkpoints.put(worker_pb2.WatchCheckpointsResponse(attempt=attempt, steps_done=15, checkpoint=b"15"))
    second = await house.worker("w2")
    await asyncio.sleep(0.2)  # the checkpoint crosses the wire
    await first.die()
    answers = [answer.event async for answer in call]
    completed = answers[-1].completed
    assert [image.data for image in completed.images] == [b"picture 0"]
    assert completed.provenance.worker == "w2"
    assert (completed.provenance.attempts, completed.provenance.repeated_steps) == (2, 5)
    (request,) = second.requests
    assert (request.attempt.number, request.checkpoint, request.spec.seed) == (2, b"15", 7)


async def test_a_lone_workers_job_waits_for_it_to_come_back(house: Running) -> None:
    worker = await house.worker("w1")
    worker.script.hold_at = 1
    job = await house.submit(prompt="a star")
    await asyncio.wait_for(worker.arrived.wait(), 2)
    await worker.die()
    await asyncio.sleep(0.5)
    assert (await house.job(job.job_id)).state == image_pb2.JOB_STATE_QUEUED
    await house.worker("w1")
    done = await house.ended(job.job_id)
    assert (done.state, done.provenance.attempts) == (image_pb2.JOB_STATE_COMPLETED, 2)


async def test_a_job_that_two_workers_die_of_is_poison_and_is_not_drawn_when_it_comes_again(house: Running) -> None:
    job = None
    for name in ("w1", "w2"):
        worker = await house.worker(name)
        worker.script.hold_at = 1
        job = job or await house.submit("order-1", prompt="a star")
        await asyncio.wait_for(worker.arrived.wait(), 3)
        await worker.die()
    assert job is not None
    ended = await house.ended(job.job_id)
    assert ended.state == image_pb2.JOB_STATE_FAILED
    assert errors.Poisoned.reason == ended.error.reason
    await house.worker("w3")
    assert (await house.submit("order-1", prompt="a star")).job_id == job.job_id


async def test_a_connection_that_breaks_while_its_worker_lives_is_nobodys_death(house: Running) -> None:
    worker = ScriptedWorker("w1", house.fleet_address)
    house.workers.append(worker)
    await worker.listen()
    async with laid(worker.address) as cable:
        await worker.join(cable.address)
        worker.script.hold_at = 3
        job = await house.submit(prompt="a star")
        for number in (1, 2):
            await _within(5, lambda number=number: len(worker.requests) == number)  # type: ignore[misc]
            async with asyncio.timeout(5):
                while (await house.job(job.job_id)).steps_done < 3:  # noqa: ASYNC110 - progress has no event
                    await asyncio.sleep(0.01)
            cable.cut()
        worker.script.release.set()
        ended = await house.ended(job.job_id)
    assert ended.state == image_pb2.JOB_STATE_COMPLETED, "two deaths would have been poison"
    assert ended.provenance.attempts == 3


async def test_a_worker_that_cannot_be_reached_costs_a_job_no_attempt_that_counts() -> None:
    async with running_gateway(max_attempts=1) as house:
        deaf = await house.worker("w1")
        await deaf.deafen()
        job = await house.submit(prompt="a star")
        await asyncio.sleep(0.3)
        # It waits, or is just being offered to the one that does not hear.
        assert (await house.job(job.job_id)).state in {image_pb2.JOB_STATE_QUEUED, image_pb2.JOB_STATE_RUNNING}
        await house.worker("w2")
        ended = await house.ended(job.job_id)
        assert (ended.state, ended.provenance.worker) == (image_pb2.JOB_STATE_COMPLETED, "w2")


async def test_a_job_is_not_lost_on_a_worker_that_has_another_model_by_now(house: Running) -> None:
    changed = await house.worker("w1")
    changed.script.failure = errors.ModelNotFound("no such model; served: other", metadata={"served": "other"})
    job = await house.submit(prompt="a star")
    await asyncio.wait_for(changed.arrived.wait(), 5)
    await house.worker("w2")
    ended = await house.ended(job.job_id)
    assert (ended.state, ended.provenance.worker) == (image_pb2.JOB_STATE_COMPLETED, "w2")


async def test_a_failed_order_whose_failure_asks_for_a_retry_is_drawn_when_it_comes_again() -> None:
    async with running_gateway(max_attempts=1) as house:
        worker = await house.worker("w1")
        worker.script.failure = errors.WorkerLost("it gave up")
        call = house.generate("order-1", prompt="a star")
        first = (await told(call)).job_id
        assert isinstance(await refusal(lambda: call), errors.WorkerLost)
        worker.script.failure = None
        again = house.generate("order-1", prompt="a star")
        events = [answer.event async for answer in again]
        assert events[-1].WhichOneof("event") == "completed"
        assert events[-1].job_id != first


async def test_a_worker_that_leaves_is_out_at_once(house: Running) -> None:
    worker = await house.worker()
    await worker.leave()
    began = time.monotonic()
    while await _names(house):
        await asyncio.sleep(0.02)
        assert time.monotonic() - began < 2


@pytest.mark.alone
async def test_a_silent_worker_is_out_within_two_seconds_and_its_late_answer_changes_nothing(house: Running) -> None:
    silent = await house.worker("silent")
    await silent.leave()
    membership = SilentMembership(house, silent)
    await membership.join()
    silent.script.hold_at = 5
    silent.script.picture = lambda index: b"too late"
    call = house.generate("order-1", prompt="a star")
    job_id = (await told(call)).job_id
    await asyncio.wait_for(silent.arrived.wait(), 2)
    other = await house.worker("w2")
    other.script.hold_at = 5
    began = time.monotonic()
    await _within(2.2, lambda: len(other.requests) == 1)
    assert time.monotonic() - began <= 2.0
    assert await _names(house) == ["w2"]
    silent.script.release.set()
    await asyncio.sleep(0.2)
    assert (await house.job(job_id)).state == image_pb2.JOB_STATE_RUNNING
    other.script.release.set()
    completed = [answer.event async for answer in call][-1].completed
    assert [image.data for image in completed.images] == [b"picture 0"]
    assert completed.provenance.worker == "w2"
    await membership.close()


async def test_a_worker_that_wakes_up_again_is_freed_of_what_counts_no_more(house: Running) -> None:
    frozen = await house.worker("frozen")
    await frozen.leave()
    membership = SilentMembership(house, frozen)
    await membership.join()
    frozen.script.hold_at = 5
    job = await house.submit(prompt="a star")
    await asyncio.wait_for(frozen.arrived.wait(), 2)
    await house.worker("w2")
    await house.ended(job.job_id)
    assert frozen.cancelled.empty()
    awake = SilentMembership(house, frozen)
    frozen.still_running(job.job_id, 1)
    await awake.join()
    await awake.speak()
    stopped = await asyncio.wait_for(frozen.cancelled.get(), 2)
    assert (stopped.job_id, stopped.number) == (job.job_id, 1)
    await membership.close()
    await awake.close()


async def test_a_short_break_of_the_fleet_stream_costs_no_attempt(house: Running) -> None:
    worker = await house.worker("w1")
    worker.script.hold_at = 5
    job = await house.submit(prompt="a star")
    await asyncio.wait_for(worker.arrived.wait(), 2)
    assert worker.membership is not None
    await worker.membership.stop()
    await asyncio.sleep(0.3)
    worker.membership.start()
    await asyncio.wait_for(worker.membership.joined.wait(), 2)
    worker.script.release.set()
    ended = await house.ended(job.job_id)
    assert (ended.state, ended.provenance.attempts) == (image_pb2.JOB_STATE_COMPLETED, 1)


async def test_a_draining_worker_finishes_what_it_has_and_gets_nothing_new(house: Running) -> None:
    draining = await house.worker("w1")
    draining.script.hold_at = 5
    running = await house.submit(prompt="a star")
    await asyncio.wait_for(draining.arrived.wait(), 2)
    draining.draining = True
    assert draining.membership is not None
    draining.membership.report_soon()
    await asyncio.sleep(0.1)
    waits = await house.submit(prompt="another")
    await asyncio.sleep(0.3)
    assert (await house.job(waits.job_id)).state == image_pb2.JOB_STATE_QUEUED
    draining.script.release.set()
    assert (await house.ended(running.job_id)).state == image_pb2.JOB_STATE_COMPLETED
    other = await house.worker("w2")
    assert (await house.ended(waits.job_id)).state == image_pb2.JOB_STATE_COMPLETED
    assert (len(draining.requests), len(other.requests)) == (1, 1)


async def test_a_job_waits_for_a_worker_only_as_long_as_the_grace() -> None:
    async with running_gateway(model_grace_s=1.0) as house:
        worker = await house.worker()
        await worker.die()
        call = house.generate("order-1", prompt="a star")
        assert (await told(call)).WhichOneof("event") == "queued"
        assert isinstance(await refusal(lambda: call), errors.NoWorker)
        error = await refusal(lambda: house.generate(prompt="another"))
        assert isinstance(error, errors.NoWorker)
        assert error.retry_after_s


async def test_a_service_that_does_not_say_who_it_is_is_refused(house: Running) -> None:
    for first in (fleet_pb2.JoinRequest(), fleet_pb2.JoinRequest(registration=fleet_pb2.Registration(name="x"))):
        call = house.fleet.Join(iter([first]))
        assert isinstance(await refusal(lambda call=call: call), errors.InvalidRequest)  # type: ignore[misc]


async def test_a_worker_with_another_model_of_the_name_joins_once_the_others_have_gone(
    house: Running, caplog: pytest.LogCaptureFixture
) -> None:
    first = await house.worker("w1")
    other = image_pb2.Model()
    other.CopyFrom(MODEL)
    other.model_hash = "cd" * 32
    newcomer = ScriptedWorker("w2", house.fleet_address, model=other)
    with pytest.raises(TimeoutError):
        await newcomer.start(join_timeout_s=0.5)
    assert await _names(house) == ["w1"]
    (warning,) = (record for record in caplog.records if record.message == "the fleet refuses this service")
    assert "w1" in warning.__dict__["text"]
    await first.die()
    assert newcomer.membership is not None
    await asyncio.wait_for(newcomer.membership.joined.wait(), 6)
    await newcomer.die()


async def test_a_second_worker_of_a_name_leaves_the_jobs_of_the_first_alone(
    house: Running, caplog: pytest.LogCaptureFixture
) -> None:
    first = await house.worker("w1")
    first.script.pace_s = 0.05
    second = ScriptedWorker("w1", house.fleet_address)
    with pytest.raises(TimeoutError):
        await second.start(join_timeout_s=0.5)
    (warning,) = (record for record in caplog.records if record.message == "the fleet refuses this service")
    assert first.registration().address in warning.__dict__["text"]
    job = await house.ended((await house.submit(prompt="a star", num_inference_steps=20)).job_id)
    assert (job.state, len(first.requests), second.requests) == (image_pb2.JOB_STATE_COMPLETED, 1, [])
    await first.die()
    assert second.membership is not None
    await asyncio.wait_for(second.membership.joined.wait(), 6)
    await second.die()


async def test_a_worker_that_does_not_answer_as_one_is_lost_and_no_word_of_its_library_is_told() -> None:
    async with running_gateway(max_attempts=2) as house:
        registration = ScriptedWorker("odd", house.fleet_address).registration()
        registration.address = house.address  # a service, but no worker: gRPC itself answers there
        membership = FleetMembership(house.fleet_address, registration, load=lambda: fleet_pb2.Load(max_rows=16))
        membership.start()
        await asyncio.wait_for(membership.joined.wait(), 5)
        error = await refusal(lambda: house.generate(prompt="a star"))
        assert isinstance(error, errors.WorkerLost)
        assert error.message == "2 workers were lost with this job"
        await membership.stop()


async def test_a_service_that_joins_and_says_nothing_is_sent_away() -> None:
    async with running_gateway(lease_s=0.3) as house:
        call = house.fleet.Join()
        error = await asyncio.wait_for(refusal(lambda: call), 2)
        assert isinstance(error, errors.DeadlinePassed)


async def test_streams_that_say_nothing_do_not_hold_up_a_stopping_gateway() -> None:
    async with running_gateway(lease_s=60) as house:
        calls = [house.fleet.Join() for _ in range(3)]
        for call in calls:
            await call.wait_for_connection()
        member = await house.worker()
        began = time.monotonic()
        await house.gateway.server.drain(house.gateway.finish)
        assert time.monotonic() - began < 1.5
        for call in calls:
            assert isinstance(await refusal(lambda call=call: call), errors.Draining)  # type: ignore[misc]
        assert not member.membership or not member.membership.joined.is_set()


async def test_a_stopping_gateway_finishes_what_it_has_and_takes_nothing_new() -> None:
    async with running_gateway() as house:
        worker = await house.worker()
        worker.script.hold_at = 5
        call = house.generate("order-1", prompt="a star")
        await told(call)
        await asyncio.wait_for(worker.arrived.wait(), 2)
        stopping = asyncio.create_task(house.gateway.server.drain(house.gateway.finish))
        await asyncio.sleep(0.5)
        error = await refusal(lambda: house.generate(prompt="another"))
        assert isinstance(error, errors.Draining)
        assert not stopping.done()
        worker.script.release.set()
        events = [answer.event async for answer in call]
        assert events[-1].WhichOneof("event") == "completed"
        await asyncio.wait_for(stopping, 3)


async def test_a_stopping_gateway_sends_those_who_wait_away_at_once() -> None:
    async with running_gateway() as house:
        worker = await house.worker()
        worker.script.hold_at = 5
        runs = house.generate("order-1", prompt="a star")
        await told(runs)
        await asyncio.wait_for(worker.arrived.wait(), 2)
        waits = house.generate("order-2", prompt="a square")
        assert (await told(waits)).WhichOneof("event") == "queued"
        stopping = asyncio.create_task(house.gateway.server.drain(house.gateway.finish))
        assert isinstance(await asyncio.wait_for(refusal(lambda: waits), 2), errors.Draining)
        assert not stopping.done()
        worker.script.release.set()
        assert [answer.event async for answer in runs][-1].WhichOneof("event") == "completed"
        await asyncio.wait_for(stopping, 3)


async def test_a_stopping_gateway_tells_those_it_cannot_finish() -> None:
    async with running_gateway(drain_grace_s=0.5) as house:
        worker = await house.worker()
        worker.script.hold_at = 5
        call = house.generate("order-1", prompt="a star")
        await told(call)
        stopping = asyncio.create_task(house.gateway.server.drain(house.gateway.finish))
        assert isinstance(await refusal(lambda: call), errors.Draining)
        await asyncio.wait_for(stopping, 3)
