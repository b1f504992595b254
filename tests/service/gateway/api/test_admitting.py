"""A gateway that is not the scheduler checks and stores submitted jobs by itself; the scheduler queues them."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bottega.errors import DeadlinePassed, InvalidRequest, QueueFull, QuotaExceeded, RequestIdReused, StorageUnavailable
from bottega.gateway.api.image_service import ImageService
from bottega.gateway.api.reservations import packed
from bottega.gateway.api.scheduler_calls import InterruptedCall
from bottega.gateway.jobs.store import JobRecord, StaleGeneration
from bottega.rpc.security.tenant_file import Quotas
from bottega.storage import os_errors
from bottega.storage.postgresql import _SETTINGS, PostgresDatabase, lock
from bottega.v1 import fleet_pb2, image_pb2
from tests.support.running_front import png
from tests.support.running_gateway import Running, refusal
from tests.support.sharing_gateways import sharing_gateways
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually


@pytest.fixture
def at_scheduler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Prompts of the submissions that were admitted by the scheduler, each with its request_id."""
    prompts: list[str] = []
    submit = ImageService.SubmitJob

    async def counted(self: ImageService, request: image_pb2.SubmitJobRequest, context: Any) -> Any:
        prompts.append(request.request_id)
        return await submit(self, request, context)

    monkeypatch.setattr(ImageService, "SubmitJob", counted)
    return prompts


async def test_a_follower_admits_jobs_that_the_scheduler_draws(pictures: str, at_scheduler: list[str]) -> None:
    async with sharing_gateways(objects=pictures) as both:
        jobs = await asyncio.gather(*(both.follower.submit(f"job-{number}", prompt="a star") for number in range(20)))
        assert at_scheduler == []
        for job in jobs:
            assert (await both.scheduler.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert sorted(job for job, _ in both.worker.begun) == sorted(job.job_id for job in jobs)
        again = await both.follower.submit("job-3", prompt="a star")
        assert again.job_id == jobs[3].job_id
        await refusal(lambda: both.follower.submit("job-3", prompt="a moon"), RequestIdReused)
        assert len(at_scheduler) == 2


async def test_input_images_are_decoded_where_they_come_in(pictures: str, at_scheduler: list[str]) -> None:
    async with sharing_gateways(objects=pictures, codec_processes=1) as both:
        await refusal(lambda: both.follower.submit(prompt="a star", image=b"no image", strength=0.5), InvalidRequest)
        image = png(64, 64)
        job = await both.follower.submit("edit", prompt="a star", image=image, strength=0.5)
        assert at_scheduler == []
        assert (await both.scheduler.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert [order.spec.image for order in both.worker.requests] == [image]


async def test_a_request_id_at_two_gateways_at_once_is_one_job(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.api.reservations._SILENT_S", math.inf)
    async with sharing_gateways(objects=pictures, hold_at=1) as both:
        houses = [both.scheduler, both.follower] * 5
        for number in range(5):
            answers = await asyncio.gather(*(house.submit(f"job-{number}", prompt="a star") for house in houses))
            assert len({answer.job_id for answer in answers}) == 1
        assert len(await both.scheduler.listed()) == 5
        assert await both.scheduler.queued() == 4
        await eventually(lambda: not both.scheduler.gateway._reservations._places)
        assert not both.scheduler.gateway._controller.queue._reserved
        both.worker.script.release.set()


async def test_the_queue_of_the_scheduler_bounds_the_jobs_of_all_gateways(
    pictures: str, at_scheduler: list[str]
) -> None:
    async with sharing_gateways(objects=pictures, hold_at=1, max_queued=4) as both:
        await both.scheduler.submit(prompt="it runs")
        await eventually(lambda: bool(both.worker.begun))
        answers = await asyncio.gather(
            *(
                house.submit(f"{number}", prompt="a star")
                for number, house in enumerate([both.scheduler, both.follower] * 5)
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(answer, image_pb2.Job) for answer in answers) == 4
        refused = await refusal(lambda: both.follower.submit(prompt="one more"), QueueFull)
        assert refused.retry_after_s is not None
        assert await both.scheduler.queued() == 4
        both.worker.script.release.set()


@pytest.mark.parametrize("quota", ["queued", "per_day"])
async def test_quotas_hold_for_jobs_of_both_gateways(quota: str, tmp_path: Path, pictures: str) -> None:
    tenants = tmp_path / "tenants.yaml"
    key = add_tenant(tenants, "shop", quotas=Quotas(**{quota: 3}))
    async with (
        sharing_gateways(objects=pictures, tenants=str(tenants), hold_at=1, max_queued=1000) as both,
        calling(both.scheduler, key) as there,
        calling(both.follower, key) as here,
    ):
        if quota == "queued":
            await there.submit(prompt="it runs")
            await eventually(lambda: bool(both.worker.begun))
        burst = (here.submit(prompt="a star") for _ in range(8))
        answers = await asyncio.gather(*burst, return_exceptions=True)
        accepted = sum(isinstance(answer, image_pb2.Job) for answer in answers)
        assert 1 <= accepted <= 3
        for house in [there, here][: 3 - accepted]:
            await house.submit(prompt="a star")
        for house in (there, here):
            refused = await refusal(lambda house=house: house.submit(prompt="one more"), QuotaExceeded)  # type: ignore[misc]
            assert refused.metadata["quota"] == quota
        both.worker.script.release.set()


async def test_a_scheduler_that_is_replaced_loses_no_job_of_a_follower(pictures: str) -> None:
    """The follower stores jobs for the first lease, or not at all, and becomes the scheduler itself."""
    async with sharing_gateways(objects=pictures, hold_at=1) as both:
        accepted: list[str] = []

        async def submit(caller: int) -> None:
            accepted.extend(
                [(await both.follower.submit(f"{caller}-{number}", prompt="a star")).job_id for number in range(8)]
            )

        submitting = asyncio.gather(*map(submit, range(4)))
        await eventually(functools.partial(_has_queued, both.scheduler, 4))
        await both.scheduler.stop_early()
        await submitting
        both.worker.script.release.set()
        assert len(set(accepted)) == 32
        for job_id in accepted:
            assert (await both.follower.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def test_a_stored_job_whose_gateway_says_nothing_is_found(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.api.reservations._SILENT_S", 0.1)
    async with sharing_gateways(objects=pictures) as both:
        admit, live, looks = both.follower.gateway._calls.admit_jobs, both.scheduler.gateway._storage.jobs.live, []

        async def looked_for(job_ids: Sequence[str]) -> Any:
            looks.append(len(job_ids))
            return await live(job_ids)

        async def only_reserve(lease: Any, request: fleet_pb2.AdmitJobsRequest) -> fleet_pb2.AdmitJobsResponse:
            return await admit(lease, fleet_pb2.AdmitJobsRequest(new_jobs=request.new_jobs))

        monkeypatch.setattr(both.follower.gateway._calls, "admit_jobs", only_reserve)
        monkeypatch.setattr(both.scheduler.gateway._storage.jobs, "live", looked_for)
        jobs = await asyncio.gather(*(both.follower.submit(prompt="a star") for _ in range(4)))
        for job in jobs:
            assert (await both.scheduler.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert sorted(job for job, _ in both.worker.begun) == sorted(job.job_id for job in jobs)
        assert max(looks) > 1


async def test_jobs_that_are_not_stored_give_their_places_back(
    pictures: str, monkeypatch: pytest.MonkeyPatch, at_scheduler: list[str]
) -> None:
    """The follower cannot write: it leaves all jobs to the scheduler."""
    monkeypatch.setattr("bottega.gateway.api.reservations._SILENT_S", math.inf)
    read_only = "{}&options=-c%20default_transaction_read_only%3Don"
    async with sharing_gateways(objects=pictures, follower_url=read_only, hold_at=1, max_queued=2) as both:
        accepted = [(await both.follower.submit(f"job-{number}", prompt="a star")).job_id for number in range(3)]
        assert not both.scheduler.gateway._reservations._places
        assert len(at_scheduler) == 3
        both.worker.script.release.set()
        assert sorted(await both.scheduler.listed()) == sorted(accepted)


async def test_a_reservation_that_is_answered_too_late_holds_no_place(
    tmp_path: Path, pictures: str, monkeypatch: pytest.MonkeyPatch, at_scheduler: list[str]
) -> None:
    monkeypatch.setattr("bottega.gateway.api.reservations._SILENT_S", math.inf)
    tenants = tmp_path / "tenants.yaml"
    key = add_tenant(tenants, "shop", quotas=Quotas(queued=1))
    async with (
        sharing_gateways(objects=pictures, tenants=str(tenants)) as both,
        calling(both.follower, key) as here,
    ):
        admit = both.follower.gateway._calls.admit_jobs

        async def late(lease: Any, request: fleet_pb2.AdmitJobsRequest) -> fleet_pb2.AdmitJobsResponse:
            answer = await admit(lease, request)
            if request.new_jobs:
                raise DeadlinePassed("no answer came in time")
            return answer

        monkeypatch.setattr(both.follower.gateway._calls, "admit_jobs", late)
        await here.submit("late", prompt="a star")
        assert at_scheduler == ["late"]
        assert not both.scheduler.gateway._reservations._places


async def test_a_tenant_whose_quota_is_locked_holds_up_no_other(
    tmp_path: Path, pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_SETTINGS, "statement_timeout", "2000ms")
    monkeypatch.setattr("bottega.gateway.api.reservations._SILENT_S", math.inf)
    tenants = tmp_path / "tenants.yaml"
    keys = [add_tenant(tenants, "shop", quotas=Quotas(per_day=9)), add_tenant(tenants, "other")]
    async with (
        sharing_gateways(objects=pictures, tenants=str(tenants)) as both,
        calling(both.follower, keys[0]) as shop,
        calling(both.follower, keys[1]) as other,
    ):
        patient = {"idle_in_transaction_session_timeout": "0"}
        database = PostgresDatabase(both.url, application="bottega test", settings=patient)
        await database.open()
        async with database.transaction(limit_s=60.0) as connection:
            await lock(connection, "quotas of shop")
            refused = await refusal(lambda: shop.submit(prompt="a star"), StorageUnavailable)
            assert refused.metadata["cause"] == os_errors.BUSY
            await other.submit(prompt="a star")
            for house in (both.scheduler, both.follower):
                assert house.gateway._storage.trouble is None
                assert not house.gateway._reservations._places
        await database.close()
        await shop.submit(prompt="a star")


@pytest.mark.parametrize("request_id", ["", "known"])
async def test_a_job_that_is_stored_after_all_runs_only_if_its_caller_can_find_it(
    request_id: str, pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bottega.gateway.api.reservations._LOOK_S", 0.05)
    async with sharing_gateways(objects=pictures) as both:
        add = both.follower.gateway._storage.jobs.add

        async def add_and_fail(*arguments: Any, **options: Any) -> Any:
            await add(*arguments, **options)
            raise StorageUnavailable("the answer of the database was lost", metadata={"cause": "EIO"})

        monkeypatch.setattr(both.follower.gateway._storage.jobs, "add", add_and_fail)
        await refusal(lambda: both.follower.submit(request_id, prompt="a star"), StorageUnavailable)
        await eventually(lambda: _all_ended(both.scheduler))
        (job_id,) = await both.scheduler.listed()
        expected = image_pb2.JOB_STATE_COMPLETED if request_id else image_pb2.JOB_STATE_CANCELLED
        assert (await both.scheduler.job(job_id)).state == expected


async def test_a_slow_database_of_the_scheduler_holds_up_no_other_job(
    tmp_path: Path, pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenants = tmp_path / "tenants.yaml"
    key = add_tenant(tenants, "shop", quotas=Quotas(per_day=9))
    async with (
        sharing_gateways(objects=pictures, tenants=str(tenants), codec_processes=1, hold_at=1) as both,
        calling(both.follower, key) as here,
    ):
        store, go_on = both.scheduler.gateway._storage.jobs, asyncio.Event()

        async def slow(*arguments: Any, **options: Any) -> bytes:
            await go_on.wait()
            return b""

        monkeypatch.setattr(store, "usage", slow)
        monkeypatch.setattr(store, "inputs", slow)
        edit = asyncio.create_task(here.submit("edit", prompt="a star", image=png(64, 64), strength=0.5))
        await eventually(lambda: bool(both.scheduler.gateway._reservations._places))
        others = await asyncio.gather(*(here.submit(f"job-{number}", prompt="a star") for number in range(3)))
        assert len({job.job_id for job in others}) == 3
        go_on.set()
        await edit
        both.worker.script.release.set()


async def test_a_database_that_is_lost_here_delays_one_read(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.api.forwarding._READ_S", 0.1)
    monkeypatch.setattr("bottega.gateway.api.forwarding.PAUSE_S", 600.0)
    monkeypatch.setattr("bottega.gateway.sharing._FOLLOW_S", 0.2)
    async with sharing_gateways(objects=pictures) as both:
        job_id = (await both.follower.submit(prompt="a star")).job_id
        await both.scheduler.ended(job_id)
        reads: list[str] = []

        async def lost(job_id: str, **options: Any) -> None:
            reads.append(job_id)
            await asyncio.Event().wait()

        async def not_followed() -> None:
            raise StorageUnavailable("PostgreSQL cannot be reached")

        monkeypatch.setattr(both.follower.gateway._storage.jobs, "get", lost)
        for _ in range(3):
            assert (await both.follower.job(job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert reads == [job_id]
        monkeypatch.setattr(both.follower.gateway._storage.jobs, "follow", not_followed)
        await eventually(lambda: not both.follower.gateway._jobs.readable)


async def test_a_scheduler_of_another_generation_reserves_nothing(
    pictures: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sharing_gateways(objects=pictures) as both:
        role, adds = both.follower.gateway._role, []

        async def stale(record: Any, **options: Any) -> Any:
            adds.append(record.job_id)
            raise StaleGeneration(1)

        monkeypatch.setattr(both.follower.gateway._storage.jobs, "add", stale)
        submitting = asyncio.create_task(both.follower.submit(prompt="a star"))
        await eventually(lambda: bool(adds))
        await asyncio.sleep(0.5)
        assert len(adds) == 1  # it waits until another gateway is the scheduler
        assert role.other is not None
        line = both.follower.gateway._following._line_to(replace(role.other, generation=role.other.generation + 1))
        with pytest.raises(InterruptedCall):
            await line.reserve(packed(JobRecord(job_id="x", fingerprint="", spec=b"", created_wall=1.0)))
        submitting.cancel()


async def test_a_call_to_an_earlier_scheduler_ends(pictures: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sharing_gateways(objects=pictures) as both:
        following, scheduler = both.follower.gateway._following, both.follower.gateway._role.other
        assert scheduler is not None

        async def silent(*arguments: Any) -> None:
            await asyncio.Event().wait()

        monkeypatch.setattr(both.follower.gateway._calls, "admit_jobs", silent)
        asking = asyncio.create_task(following._line_to(scheduler).reserve(b"x"))
        await asyncio.sleep(0)
        following._line_to(replace(scheduler, generation=scheduler.generation + 1))
        with pytest.raises(InterruptedCall):
            await asking


async def test_a_late_repeat_of_a_reservation_starts_no_job_twice(pictures: str) -> None:
    async with sharing_gateways(objects=pictures, hold_at=1) as both:
        job_id = (await both.follower.submit(prompt="a star")).job_id
        record = await both.scheduler.gateway._storage.jobs.get(job_id)
        assert record is not None
        new = packed(replace(record, sequence=0, state=image_pb2.JOB_STATE_QUEUED, decisions=b""))
        (refused,) = (
            await both.scheduler.gateway._reservations.admit(fleet_pb2.AdmitJobsRequest(new_jobs=[new]))
        ).refusals
        assert refused.code
        assert not both.scheduler.gateway._reservations._places
        both.worker.script.release.set()
        assert (await both.scheduler.ended(job_id)).state == image_pb2.JOB_STATE_COMPLETED


async def _all_ended(house: Running) -> bool:
    jobs = (await house.images.ListJobs(image_pb2.ListJobsRequest(), timeout=20)).jobs
    return bool(jobs) and all(job.HasField("end_time") for job in jobs)


async def _has_queued(house: Running, number: int) -> bool:
    return await house.queued() >= number
