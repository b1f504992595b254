"""`bottega controlnets profile` and the SDK's part in it, against a real gateway with scripted workers and servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image

from bottega import errors
from bottega.client import AsyncClient, ProfileCase
from bottega.v1 import generation_pb2
from bottega.v1.hosted_pb2 import ResidualProfile
from tests.fakes.scripted_controlnet import hosted
from tests.fakes.scripted_worker import MODEL
from tests.support.addon_messages import placements
from tests.support.running_gateway import Running, running_gateway
from tests.support.terminal import run_at

PROFILE = ("controlnets", "profile")


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    async with running_gateway(codec_processes=1) as running:
        yield running


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "control.png"
    Image.new("RGB", (64, 64), "white").save(path)
    return path


async def test_it_draws_with_every_image_and_the_servers_remember_the_worst(house: Running, image: Path) -> None:
    worker = await house.worker()
    worker.script.similarity = 0.9931
    first = await house.controlnets("s1", hosted("depth"))
    other = await house.controlnets("s2", hosted("edges"))
    result = await run_at(house, *PROFILE, "depth", image, image, "--prompt", "a house", "--steps", 20)
    assert result.exit_code == 0, result.output
    assert result.stdout == "depth: 0.9931 from step to step, of 20; s1 will remember it\n"
    assert "Requests of 20 steps and more that allow approximations" in result.stderr
    assert [(each.spec.prompt, each.spec.num_inference_steps, each.spec.seed) for each in worker.requests] == [
        ("a house", 20, 0),
        ("a house", 20, 1),
    ]
    assert all(each.spec.controlnets[0].measure_similarity for each in worker.requests)
    noted = ResidualProfile(model_hash=MODEL.model_hash, num_inference_steps=20, similarity=0.9931)
    assert list(first.nets["depth"].profiles) == [noted]
    assert not other.nets["edges"].profiles


async def test_requests_are_told_of_the_profile_and_the_list_shows_it(house: Running, image: Path) -> None:
    worker = await house.worker()
    await house.controlnets("s1", hosted("edges"))
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
        assert await client.set_controlnet_profile("edges", similarity=0.992, num_inference_steps=20) == ("s1",)
        async with asyncio.timeout(5):
            while not (await client.controlnets())[0].profiles:  # noqa: ASYNC110 - a report has no event
                await asyncio.sleep(0.02)
    net = generation_pb2.ControlNet(name="edges", image=await asyncio.to_thread(image.read_bytes))
    for steps, told in ((20, True), (19, False)):
        await house.draw(prompt="a star", num_inference_steps=steps, controlnets=[net])
        (hosts,) = placements(worker.requests[-1].addons)
        assert (hosts.HasField("similarity"), hosts.similarity) == (told, 0.992 if told else 0.0)
    assert "0.9920" in (await run_at(house, "controlnets")).stdout


async def test_below_the_bound_it_is_said_that_steps_go_on_waiting(house: Running, image: Path) -> None:
    (await house.worker()).script.similarity = 0.9899
    await house.controlnets("s1", hosted("depth"))
    result = await run_at(house, *PROFILE, "depth", image)
    assert result.exit_code == 0, result.output
    assert "Below 0.99: every step still waits for its own residuals." in result.stderr


async def test_the_miniatures_own_controlnets_need_no_images_and_others_do(house: Running) -> None:
    worker = await house.worker()
    await house.controlnets("s1", hosted("edges"), hosted("depth"))
    result = await run_at(house, *PROFILE, "edges")
    assert result.exit_code == 0, result.output
    assert len({each.spec.prompt for each in worker.requests}) == 4
    result = await run_at(house, *PROFILE, "depth")
    assert result.exit_code == 2
    assert "bottega controlnets profile depth IMAGE..." in result.stderr


async def test_what_cannot_be_measured_is_said(house: Running, image: Path) -> None:
    worker = await house.worker()
    worker.script.similarity = None
    await house.controlnets("s1", hosted("edges"))
    result = await run_at(house, *PROFILE, "edges", image, "--steps", 2)
    assert "two steps are needed" in result.stderr
    assert (await run_at(house, *PROFILE, "nobody", image)).exit_code == 1
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
        with pytest.raises(errors.InvalidRequest, match="at least one"):
            await client.profile_controlnet("edges", [])
        with pytest.raises(errors.ControlNetNotFound, match="no ControlNet server hosts nobody"):
            await client.set_controlnet_profile("nobody", similarity=1.0, num_inference_steps=1)
        with pytest.raises(errors.ModelNotFound, match="served: miniature"):
            await client.set_controlnet_profile("edges", similarity=1.0, num_inference_steps=1, model="other")


async def test_a_server_that_cannot_note_it_is_heard(house: Running, image: Path) -> None:
    await house.worker()
    server = await house.controlnets("s1", hosted("edges"))
    server.failure = errors.StorageUnavailable("profiles.json cannot be written: No space left on device")
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
        with pytest.raises(errors.StorageUnavailable, match="cannot be written"):
            await client.profile_controlnet("edges", [ProfileCase(prompt="", image=image)])
