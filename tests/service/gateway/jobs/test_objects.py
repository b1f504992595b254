"""A gateway whose pictures are in S3: restarts, deletions, S3 that fails or is away, and unusable buckets."""

from __future__ import annotations

import asyncio
import hashlib
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest

from bottega import errors
from bottega.config import parse
from bottega.errors import ConfigError
from bottega.gateway.config import GatewayConfig
from bottega.storage import ContentStore
from bottega.v1 import image_pb2
from tests.fakes.scripted_worker import ScriptedWorker
from tests.support.postgresql import new_database
from tests.support.running_gateway import Running, refusal, running_gateway
from tests.support.s3 import SECRET, FailingProxy, S3Server
from tests.support.services import Services, gateway_config
from tests.support.waiting import eventually


async def _delete(house: Running, job_id: str) -> None:
    await house.images.DeleteJob(image_pb2.DeleteJobRequest(job_id=job_id), timeout=20)


async def test_a_picture_is_in_the_bucket_until_its_job_is_deleted(s3_server: S3Server, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    async with running_gateway(state=str(tmp_path / "one"), objects=f"s3://{bucket}/pictures") as house:
        await house.worker()
        job = await house.ended((await house.submit("order-1", prompt="a star", seed=5)).job_id)
        (key,) = s3_server.keys(bucket)
        digest = job.images[0].digest
        assert key.startswith(f"pictures/{digest[:2]}/{digest}-")
        again = await house.ended((await house.submit("order-2", prompt="a star", seed=5)).job_id)
        assert again.images[0].digest == digest
        assert len(s3_server.keys(bucket)) == 2, "an identical request has a copy of its own"
    for file in (tmp_path / "one" / "images").glob("??/*"):
        file.unlink()  # the disk of the machine is new
    async with running_gateway(state=str(tmp_path / "one"), objects=f"s3://{bucket}/pictures") as house:
        assert await house.image(job.job_id) == b"picture 0"
        await _delete(house, job.job_id)
        assert await house.image(again.job_id) == b"picture 0"
        await _delete(house, again.job_id)
        assert s3_server.keys(bucket) == []


async def test_a_follower_keeps_no_pictures_on_its_disk(s3_server: S3Server, tmp_path: Path) -> None:
    folder, data = tmp_path / "two" / "images", b"a picture of a deleted job"
    kept = ContentStore(folder, budget_bytes=1 << 20, ttl_s=3600)  # from its time as the scheduler
    await kept.open()
    await kept.put(hashlib.sha256(data).hexdigest(), data)
    await kept.close()
    assert len(list(folder.glob("??/*"))) == 1
    with new_database() as jobs:
        shared = partial(running_gateway, jobs=jobs, objects=f"s3://{s3_server.bucket()}")
        async with shared(name="one"), shared(name="two", state=str(tmp_path / "two")):
            assert list(folder.glob("??/*")) == []


async def test_gateways_that_share_jobs_share_their_pictures(s3_server: S3Server, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    with new_database() as jobs:
        shared = partial(running_gateway, jobs=jobs, objects=f"s3://{bucket}")
        async with (
            shared(name="one", state=str(tmp_path / "one")) as one,
            shared(name="two", state=str(tmp_path / "two")) as two,
        ):
            worker = ScriptedWorker("w1", f"{one.fleet_address},{two.fleet_address}")
            await worker.start()
            try:
                job = await two.ended((await two.submit(prompt="a star", seed=5)).job_id)
                same = await one.ended((await one.submit(prompt="a star", seed=5)).job_id)
                for house in (one, two):
                    assert await house.image(job.job_id) == b"picture 0"
                await _delete(one, job.job_id)
                assert await two.image(same.job_id) == b"picture 0"
                await _delete(two, same.job_id)
                assert s3_server.keys(bucket) == []
            finally:
                await worker.die()


async def test_while_s3_is_away_no_job_is_accepted_and_none_is_lost(
    s3_server: S3Server, s3_proxy: FailingProxy, tmp_path: Path
) -> None:
    async with running_gateway(state=str(tmp_path), objects=f"s3://{s3_server.bucket()}") as house:
        worker = await house.worker(hold_at=5)
        job = await house.submit(prompt="a star")
        await worker.arrived.wait()
        s3_proxy.refusal = "ServiceUnavailable"
        worker.script.release.set()
        await eventually(lambda: house.gateway.server.registry.get_sample_value("bottega_store_in_trouble") == 1)
        error = await refusal(lambda: house.generate(prompt="another"), errors.StorageUnavailable)
        assert error.message == "the object storage cannot be used"
        assert (await house.job(job.job_id)).state == image_pb2.JOB_STATE_RUNNING
        s3_proxy.refusal = ""
        assert (await house.ended(job.job_id)).state == image_pb2.JOB_STATE_COMPLETED
        assert await house.image(job.job_id) == b"picture 0"
        await house.until_serving()
        await house.draw(prompt="another")


async def test_a_bucket_that_cannot_be_used_ends_the_start_with_a_sentence(s3_server: S3Server, tmp_path: Path) -> None:
    config = gateway_config(state=str(tmp_path / "state"), objects="s3://no-such-bucket/a")
    with Services(tmp_path) as services, pytest.raises(AssertionError, match="ended with 2 before it served") as ended:
        services.start("gateway", config)
    said = str(ended.value)
    assert said.splitlines()[-1].startswith("bottega.gateway: objects: the bucket no-such-bucket does not exist")
    assert "Traceback" not in said
    assert SECRET not in said


async def test_a_gateway_waits_for_s3_that_does_not_answer_yet(
    s3_server: S3Server, s3_proxy: FailingProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    s3_proxy.refusal = "ServiceUnavailable"
    async with running_gateway(state=str(tmp_path), objects=f"s3://{s3_server.bucket()}", starting=True) as house:
        await eventually(lambda: "the object storage cannot be used" in caplog.text)
        assert not await house.is_serving()
        s3_proxy.refusal = ""
        await house.until_serving()


async def test_a_scheduler_without_s3_lets_another_gateway_take_over(
    s3_server: S3Server, s3_proxy: FailingProxy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("bottega.gateway.gateway._TAKEOVER_S", 1.0)
    s3_proxy.refusal = "ServiceUnavailable"
    objects = f"s3://{s3_server.bucket()}"
    with new_database() as url:
        async with running_gateway(jobs=url, name="sick", objects=objects, starting=True) as sick:
            assert sick.gateway.failed is not None
            error = await asyncio.shield(sick.gateway.failed)
            assert error.message == "the object storage cannot be used"
            assert "lets another one become the scheduler" in caplog.text
            s3_proxy.refusal = ""
            async with running_gateway(jobs=url, name="well", objects=objects) as well:
                assert await well.listed() == []


async def test_a_picture_has_a_url_where_the_operator_allows_it(s3_server: S3Server, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    request = image_pb2.GetImageRequest(as_url=True)
    for public in (s3_server.url, ""):
        async with running_gateway(
            state=str(tmp_path), objects=f"s3://{bucket}", objects_public_endpoint=public
        ) as house:
            await house.worker()
            job = await house.ended((await house.submit("order", prompt="a star")).job_id)
            request.job_id = job.job_id
            (answer,) = [answer async for answer in house.images.GetImage(request, timeout=20)]
            assert (answer.image.digest, answer.chunk) == (job.images[0].digest, b"")
            if public:
                url = answer.image.url
                assert await asyncio.to_thread(_fetched, url) == b"picture 0"
                assert SECRET not in url
            else:
                assert answer.image.url == ""
            request.index = 5
            await refusal(lambda house=house: house.images.GetImage(request), errors.ImageNotFound)  # type: ignore[misc]
            request.index = 0
            await _delete(house, job.job_id)
    with pytest.raises(urllib.error.HTTPError) as raised:
        await asyncio.to_thread(_fetched, url)
    assert raised.value.code == 404, "the picture is deleted, whatever its URL says"
    raised.value.close()


def _fetched(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return bytes(answer.read())


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("objects", "s3://bucket/"),
        *(("objects_public_endpoint", wrong) for wrong in ("s3.example.com", "https://user:secret@host", "ftp://host")),
    ],
)
def test_a_location_of_another_form_is_a_wrong_key(key: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: ") as raised:
        parse(GatewayConfig, {key: wrong}, source="gateway.yaml")
    assert "secret" not in str(raised.value)
