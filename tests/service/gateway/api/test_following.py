"""A gateway that is not the scheduler answers reads of ended jobs by itself, and leaves the others to the scheduler."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from bottega.errors import ImageNotFound, InvalidRequest, JobNotFound, Unavailable
from bottega.v1 import image_pb2
from tests.support.running_gateway import refusal
from tests.support.s3 import S3Server
from tests.support.sharing_gateways import Sharing, sharing_gateways
from tests.support.tenants import add_tenant, calling

# Other gateways cannot reach the scheduler's public port here.
_NOWHERE = "127.0.0.1:1"


def _apart(pictures: str, **config: Any) -> contextlib.AbstractAsyncContextManager[Sharing]:
    """The scheduler with a worker, and a follower that cannot ask it."""
    return sharing_gateways(objects=pictures, scheduler={"advertised": _NOWHERE}, **config)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bottega.gateway.api.scheduler_calls._WAIT_S", 2.0)


async def test_a_follower_reads_ended_jobs_and_no_others_without_the_scheduler(pictures: str) -> None:
    async with _apart(pictures) as both:
        scheduler, follower = both.scheduler, both.follower
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
        both.worker.script.hold_at = 1
        live = (await scheduler.submit(prompt="a star")).job_id
        for call in (lambda: follower.job(live), lambda: follower.ended(live), follower.listed):
            await refusal(call, Unavailable)


async def test_a_follower_keeps_tenants_and_their_page_tokens_apart(tmp_path: Path, pictures: str) -> None:
    tenants = tmp_path / "tenants.yaml"
    keys = [add_tenant(tenants, name) for name in ("shop", "bank")]
    async with (
        _apart(pictures, tenants=str(tenants)) as both,
        calling(both.scheduler, keys[0]) as shop_there,
        calling(both.follower, keys[0]) as shop,
        calling(both.follower, keys[1]) as bank,
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


async def test_a_follower_answers_no_damaged_picture(s3_server: S3Server, pictures: str) -> None:
    bucket = urlsplit(pictures).netloc
    async with _apart(pictures) as both:
        scheduler, follower = both.scheduler, both.follower
        job = await scheduler.ended((await scheduler.submit(prompt="a star")).job_id)
        (key,) = s3_server.keys(bucket)
        s3_server.put(bucket, key, b"another 0")
        await refusal(lambda: follower.images.GetImage(image_pb2.GetImageRequest(job_id=job.job_id)), Unavailable)
        request = image_pb2.WatchJobRequest(job_id=job.job_id)
        events = [answer.event async for answer in follower.images.WatchJob(request, timeout=20)]
        assert events[0].completed.images[0].data == b""
        assert await scheduler.image(job.job_id) == b"picture 0"  # from its folder


async def test_a_follower_that_cannot_write_to_the_database_reads(pictures: str) -> None:
    async with _apart(pictures, follower_url="{}&options=-c%20default_transaction_read_only%3Don") as both:
        job = await both.scheduler.ended((await both.scheduler.submit(prompt="a star")).job_id)
        assert await both.follower.job(job.job_id) == job
