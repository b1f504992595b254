"""The real gateway over the wire, with workers and ControlNet servers that do what the test says."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from bottega import errors
from bottega.addons.controlnets.gateway.addon import ControlNetAddOn
from bottega.v1 import hosted_pb2, image_pb2
from bottega.v1.generation_pb2 import ControlNet
from tests.fakes.scripted_controlnet import hosted
from tests.support.addon_messages import placements
from tests.support.running_front import png
from tests.support.running_gateway import Running, refusal, running_gateway

COMPLETED = image_pb2.JOB_STATE_COMPLETED


# A control image; its size need not be the picture's.
PNG = png(32, 24, "red")


def _edges(**facts: object) -> ControlNet:
    return ControlNet(**{"name": "edges", "image": PNG, **facts})  # type: ignore[arg-type]


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    async with running_gateway(codec_processes=1, max_image_pixels=64 * 64) as running:
        yield running


async def test_a_picture_is_drawn_with_controlnets_and_its_provenance_says_how(house: Running) -> None:
    worker = await house.worker()
    server = await house.controlnets("s1", hosted("edges"), hosted("depth"))
    nets = [
        _edges(controlnet_conditioning_scale=0.5),
        ControlNet(name="depth", image=png(32, 24, "blue"), guess_mode=True),
    ]
    completed = await house.draw(prompt="a star", controlnets=nets)
    (request,) = worker.requests
    assert [net.image for net in request.spec.controlnets] == [PNG, png(32, 24, "blue")]
    edges, depth = request.spec.controlnets
    assert edges.controlnet_conditioning_scale == 0.5
    assert all(net.HasField("control_guidance_start") and net.control_guidance_end == 1 for net in (edges, depth))
    assert (depth.controlnet_conditioning_scale, depth.guess_mode) == (1, True)
    assert [
        (hosts.digest, [(one.name, one.address) for one in hosts.servers]) for hosts in placements(request.addons)
    ] == [
        ("hash of edges", [("s1", server.address)]),
        ("hash of depth", [("s1", server.address)]),
    ]
    provenance = completed.provenance
    assert [(net.name, net.image) for net in provenance.parameters.controlnets] == [("edges", b""), ("depth", b"")]
    uses = [(use.name, list(use.servers), use.scale) for use in provenance.controlnets]
    assert uses == [("edges", ["s1"], 0.5), ("depth", ["s1"], 1)]


async def test_a_bad_control_image_is_refused_by_its_field_with_all_other_violations(house: Running) -> None:
    worker = await house.worker()
    await house.controlnets("s1", hosted("edges"))
    for bad in (b"no image at all", PNG[: len(PNG) // 2], png(65, 64)):
        nets = [_edges(), _edges(image=bad)]
        error = await refusal(functools.partial(house.generate, controlnets=nets), errors.BadImage)
        assert [violation.field for violation in error.violations] == ["spec.controlnets[1].image"]
    nets = [_edges(image=b"", control_guidance_start=2.0), _edges(image=b"no image", name="no such")]
    error = await refusal(lambda: house.generate(controlnets=nets, width=63))
    assert type(error) is errors.InvalidRequest
    assert {violation.field for violation in error.violations} == {
        "spec.controlnets[0].control_guidance_start",
        "spec.controlnets[0].image",
        "spec.controlnets[1].name",
        "spec.controlnets[1].image",
        "spec.width",
    }
    error = await refusal(lambda: house.generate(controlnets=[_edges(image=b"no image", name="pose")]))
    assert isinstance(error, errors.BadImage), "what is wrong comes before what is not there"
    error = await refusal(lambda: house.generate(controlnets=[_edges(name="pose")]), errors.ControlNetNotFound)
    assert error.metadata == {"served": "edges"}
    assert worker.requests == []


async def test_a_job_with_control_images_survives_its_gateway(tmp_path: Path) -> None:
    nets = [_edges(controlnet_conditioning_scale=0.5), _edges(image=png(32, 24, "blue"))]
    async with running_gateway(state=str(tmp_path), codec_processes=1) as house:
        worker = await house.worker()
        await house.controlnets("s1", hosted("edges"))
        worker.script.hold_at = 1
        await house.submit(prompt="a square")
        job = await house.submit("order-1", prompt="a star", controlnets=nets)
        assert [net.image for net in job.spec.controlnets] == [b"", b""]
    async with running_gateway(state=str(tmp_path), codec_processes=1) as house:
        again = await house.submit("order-1", prompt="a star", controlnets=nets)
        assert again.job_id == job.job_id
        other = [nets[0], _edges(image=png(32, 24, "green"))]
        await refusal(lambda: house.generate("order-1", prompt="a star", controlnets=other), errors.RequestIdReused)
        worker = await house.worker()
        await asyncio.sleep(0.3)
        assert not any(request.attempt.job_id == job.job_id for request in worker.requests), "nobody hosts it yet"
        await house.controlnets("s1", hosted("edges"))
        assert (await house.ended(job.job_id)).state == COMPLETED
        (request,) = (one for one in worker.requests if one.attempt.job_id == job.job_id)
        assert [net.image for net in request.spec.controlnets] == [PNG, png(32, 24, "blue")]
        assert [hosts.servers[0].name for hosts in placements(request.addons)] == ["s1", "s1"]


def _hosts(house: Running) -> list[tuple[object, hosted_pb2.Hosted]]:
    (controlnets,) = (a for a in house.gateway._controller._addons if isinstance(a, ControlNetAddOn))
    return list(controlnets._hosts.hosts("edges", ""))
