"""Finished pictures are signed with the operator's certificate before they are stored, or not delivered."""

from __future__ import annotations

import time
from pathlib import Path

import grpc
import pytest
from PIL import Image

from bottega.clocks import Clock
from bottega.codec import images
from bottega.content_credentials import read
from bottega.errors import CannotSign
from bottega.gateway.config import SigningConfig
from bottega.rpc.status import from_job_error, from_rpc_error
from bottega.v1 import generation_pb2
from tests.support.picture_certificates import PictureAuthority
from tests.support.running_gateway import running_gateway


@pytest.fixture
def signing(tmp_path: Path) -> SigningConfig:
    certificate, key = PictureAuthority().issue(tmp_path)
    return SigningConfig(certificate=str(certificate), key=str(key))


async def test_every_picture_is_signed_and_one_that_cannot_be_is_not_delivered(
    signing: SigningConfig,
) -> None:
    async with running_gateway(signing=signing) as house:
        worker = await house.worker()
        jpeg = images.encode_image(Image.new("RGB", (8, 8)), generation_pb2.IMAGE_FORMAT_JPEG, 90, {})
        worker.script.picture = lambda index: jpeg
        job = await house.submit(prompt="a star", num_images=2, format=generation_pb2.IMAGE_FORMAT_JPEG)
        done = await house.ended(job.job_id)
        found = read(await house.image(job.job_id))
        assert found is not None
        assert (found.state, found.facts["model"]) == ("valid", "miniature")
        assert "sign" in {time.stage for time in done.provenance.times}
        worker.script.picture = lambda index: b"no picture"
        failed = await house.ended((await house.submit(prompt="a star")).job_id)
        assert "the picture cannot be signed" in from_job_error(failed.error).message


async def test_an_expired_certificate_refuses_jobs_until_it_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    authority = PictureAuthority()
    authority.issue(tmp_path)
    async with running_gateway(signing=SigningConfig(certificate="~/pictures.pem", key="~/pictures.key")) as house:
        worker = await house.worker()
        png = images.encode_image(Image.new("RGB", (8, 8)), generation_pb2.IMAGE_FORMAT_PNG, 90, {})
        worker.script.picture = lambda index: png
        house.gateway._controller.signing._clock = Clock(wall=lambda: time.time() + 6 * 86_400)
        name = "bottega_signing_certificate_expires_timestamp_seconds"
        assert time.time() < (house.gateway.server.registry.get_sample_value(name) or 0) < time.time() + 6 * 86_400
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await house.submit(prompt="a star")
        assert isinstance(from_rpc_error(caught.value), CannotSign)
        (tmp_path / "pictures.pem").write_text("half of it")
        with pytest.raises(grpc.aio.AioRpcError, match="has expired"):
            await house.submit(prompt="a star")
        authority.issue(tmp_path, days=20)
        job = await house.submit(prompt="a star")
        await house.ended(job.job_id)
        assert read(await house.image(job.job_id)) is not None
