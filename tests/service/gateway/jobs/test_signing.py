"""Finished pictures are signed with the operator's certificate before they are stored, or not delivered."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from bottega.codec import images
from bottega.content_credentials import read
from bottega.gateway.config import SigningConfig
from bottega.rpc.status import from_job_error
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
