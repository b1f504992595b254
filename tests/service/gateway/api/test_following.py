"""A gateway that is not the scheduler answers reads of ended jobs by itself, and leaves the others to the scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bottega.errors import ImageNotFound, InvalidRequest, JobNotFound, Unavailable
from bottega.v1 import image_pb2
from tests.support.postgresql import new_database
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.s3 import S3Servers
from tests.support.tenants import add_tenant, calling
from tests.support.waiting import eventually

# Other gateways cannot reach the scheduler's public port here.
_NOWHERE = "127.0.0.1:1"


@contextlib.asynccontextmanager
async def _apart(pictures: str, **config: Any) -> AsyncIterator[tuple[Running, Running]]:
    """The scheduler with a worker, and a follower that cannot ask it."""
    with new_database() as url:
        async with (
            running_gateway(jobs=url, name="first", objects=pictures, advertised=_NOWHERE, **config) as scheduler,
            running_gateway(jobs=url, name="second", objects=pictures, **config) as follower,
        ):
            await scheduler.worker()
            await eventually(lambda: follower.gateway._jobs.readable)
            yield scheduler, follower


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.api.scheduler_calls._WAIT_S", 2.0)


async def test_a_follower_reads_ended_jobs_without_the_scheduler(pictures: str) -> None:
    async with _apart(pictures) as (scheduler, follower):
        jobs = [(await scheduler.submit(f"job-{number}", prompt="a star")).job_id for number in range(3)]
        for job_id in jobs:
            assert await scheduler.ended(job_id) == await follower.ended(job_id)
        assert await follower.listed() == await scheduler.listed() == jobs[::-1]
        assert await follower.image(jobs[0]) == await scheduler.image(jobs[0]) == b"picture 0"
        request = image_pb2.WatchJobRequest(job_id=jobs[0])
        events = [answer.event async for answer in follower.images.WatchJob(request, timeout=20)]
        assert [image.data for image in events[0].completed.images] == [b"picture 0"]
        await scheduler.images.DeleteJob(image_pb2.DeleteJobRequest(job_id=jobs[0]), timeout=20)
        await refusal(lambda: follower.job(jobs[0]), JobNotFound)
        await refusal(lambda: follower.image(jobs[0]), JobNotFound)
        index = image_pb2.GetImageRequest(job_id=jobs[1], index=7)
        await refusal(lambda: follower.images.GetImage(index, timeout=20), ImageNotFound)


async def test_a_follower_asks_the_scheduler_for_jobs_that_have_not_ended(pictures: str) -> None:
    async with _apart(pictures) as (scheduler, follower):
        scheduler.workers[0].script.hold_at = 1
        live = (await scheduler.submit(prompt="a star")).job_id
        for call in (lambda: follower.job(live), lambda: follower.ended(live), follower.listed):
            await refusal(call, Unavailable)


async def test_a_follower_keeps_tenants_and_their_page_tokens_apart(tmp_path: Path, pictures: str) -> None:
    tenants = tmp_path / "tenants.yaml"
    keys = [add_tenant(tenants, name) for name in ("shop", "bank")]
    async with (
        _apart(pictures, tenants=str(tenants)) as (scheduler, follower),
        calling(scheduler, keys[0]) as shop_there,
        calling(follower, keys[0]) as shop,
        calling(follower, keys[1]) as bank,
    ):
        jobs = [(await shop_there.submit(prompt="a star")).job_id for _ in range(2)]
        for job_id in jobs:
            await shop_there.ended(job_id)
        assert await bank.listed() == []
        await refusal(lambda: bank.job(jobs[0]), JobNotFound)
        await refusal(lambda: bank.image(jobs[0]), JobNotFound)
        first = await shop_there.images.ListJobs(image_pb2.ListJobsRequest(page_size=1), timeout=20)
        request = image_pb2.ListJobsRequest(page_size=1, page_token=first.next_page_token)
        second = await shop.images.ListJobs(request, timeout=20)
        assert [job.job_id for job in second.jobs] == jobs[:1]
        await refusal(lambda: bank.images.ListJobs(request, timeout=20), InvalidRequest)


async def test_a_follower_answers_no_damaged_picture(s3_servers: S3Servers, pictures: str) -> None:
    bucket = urlsplit(pictures).netloc
    async with _apart(pictures) as (scheduler, follower):
        job = await scheduler.ended((await scheduler.submit(prompt="a star")).job_id)
        server = s3_servers.get("nanio")
        (key,) = server.keys(bucket)
        server.put(bucket, key, b"another 0")
        await refusal(lambda: follower.images.GetImage(image_pb2.GetImageRequest(job_id=job.job_id)), Unavailable)
        request = image_pb2.WatchJobRequest(job_id=job.job_id)
        events = [answer.event async for answer in follower.images.WatchJob(request, timeout=20)]
        assert events[0].completed.images[0].data == b""
        assert await scheduler.image(job.job_id) == b"picture 0"  # from its folder


async def test_a_follower_that_cannot_write_to_the_database_reads(pictures: str) -> None:
    with new_database() as url:
        read_only = f"{url}&options=-c%20default_transaction_read_only%3Don"
        async with (
            running_gateway(jobs=url, name="first", objects=pictures, advertised=_NOWHERE) as scheduler,
            running_gateway(jobs=read_only, name="second", objects=pictures) as follower,
        ):
            await scheduler.worker()
            job = await scheduler.ended((await scheduler.submit(prompt="a star")).job_id)
            await eventually(lambda: follower.gateway._jobs.readable)
            assert await follower.job(job.job_id) == job
