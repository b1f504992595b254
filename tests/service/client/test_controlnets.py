"""`bottega controlnets` and the SDK's view of it, against a real gateway with scripted ControlNet servers."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from PIL import Image

from bottega import errors
from bottega.client import AsyncClient, ControlNet, ServedControlNet
from bottega.client.checkup.gateway import check_gateway
from bottega.v1 import hosted_pb2
from tests.fakes.scripted_controlnet import ON_DISK, hosted
from tests.support.running_gateway import Running, running_gateway
from tests.support.terminal import run_at


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    async with running_gateway(codec_processes=1) as running:
        yield running


async def _served(house: Running) -> tuple[ServedControlNet, ...]:
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
        return await client.controlnets()


async def test_controlnets_are_listed_with_size_model_and_where_they_are_loaded(house: Running) -> None:
    await house.worker()
    size = 24 << 20
    await house.controlnets("s1", hosted("edges", size_bytes=size, popularity=3), hosted("depth", state=ON_DISK))
    await house.controlnets("s2", hosted("edges", size_bytes=size, popularity=4), hosted("pose", base="sdxl"))
    depth, edges, pose = await _served(house)
    assert (edges.name, edges.models, edges.popularity, edges.loaded_at) == ("edges", ("miniature",), 7, ("s1", "s2"))
    assert (depth.loaded_at, pose.models) == ((), ())
    for listing in (("controlnets",), ("controlnets", "list")):
        result = await run_at(house, *listing)
        assert result.exit_code == 0
        rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
        assert rows["edges"].split() == ["edges", "24", "MiB", "miniature", "s1,", "s2", "2", "7", "-"]
        assert "nobody" in rows["depth"]
        assert "no model here (sdxl)" in rows["pose"]


async def test_where_a_controlnet_is_and_how_it_stands_there(house: Running) -> None:
    server = await house.controlnets("s1", hosted("edges", sessions=2, popularity=5))
    await house.controlnets("s2", hosted("edges", state=hosted_pb2.HOSTED_STATE_LOADING, digest="f" * 64))
    result = await run_at(house, "controlnets", "where", "edges")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["s1", "controlnet", server.address, "loaded", "2", "5", "hash"] in [row[:7] for row in rows]
    assert any(row[:1] == ["s2"] and "loading" in row and row[-1] == "f" * 12 for row in rows)
    assert "another one" in result.stderr, "two versions under one name"
    missing = await run_at(house, "controlnets", "where", "lines")
    assert missing.exit_code == 1
    assert "nobody hosts lines" in missing.stderr
    assert "Hosted: edges" in missing.stderr


async def test_without_any_server_it_is_said_what_to_look_at(house: Running) -> None:
    result = await run_at(house, "controlnets")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "bottega fleet" in result.stderr
    result = await run_at(house, "controlnets", "add", "edges", "/srv/edges")
    assert result.exit_code == 1
    assert "no ControlNet server has joined" in result.stderr


async def test_a_folder_is_added_at_every_server_or_at_one(house: Running, tmp_path: Path) -> None:
    first = await house.controlnets("s1", hosted("edges"))
    second = await house.controlnets("s2", hosted("edges"))
    result = await run_at(house, "controlnets", "add", "depth", "nets/depth")
    assert result.exit_code == 0, result.output
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == ["s1 hosts depth", "s2 hosts depth"]
    assert first.added == second.added == [("depth", "nets/depth")]
    result = await run_at(house, "controlnets", "add", "pose", str(tmp_path), "--server", "s2")
    assert result.exit_code == 0
    assert (first.added[1:], second.added[1:]) == ([], [("pose", str(tmp_path))])
    async with asyncio.timeout(5):
        while [net.name for net in await _served(house)] != ["depth", "edges", "pose"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    unknown = await run_at(house, "controlnets", "add", "pose", "pose", "--server", "s9")
    assert unknown.exit_code == 2
    assert "joined: s1, s2" in unknown.stderr


async def test_a_server_that_refuses_or_is_gone_is_named_and_the_others_have_it(house: Running) -> None:
    for name in ("s1", "s2", "s3"):
        await house.controlnets(name, hosted("edges"))
    good, refuses, gone = house.servers
    refuses.failure = errors.ControlNetUnusable("ControlNet depth cannot be used: no weights in /srv/depth")
    await gone._server.grpc.stop(0)
    result = await run_at(house, "controlnets", "add", "depth", "/srv/depth")
    assert result.exit_code == 1
    assert result.stdout.startswith("s1 hosts depth")
    assert "s2: ControlNet depth cannot be used: no weights in /srv/depth" in result.stderr
    assert f"s3: ControlNet server s3 does not answer at {gone.address}" in result.stderr
    assert good.added == [("depth", "/srv/depth")]


async def test_a_picture_is_drawn_with_controlnets_through_the_sdk_and_the_command(
    house: Running, tmp_path: Path
) -> None:
    worker = await house.worker()
    await house.controlnets("s1", hosted("edges"))
    control = tmp_path / "edges.png"
    control.write_bytes(_png())
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
        nets = [ControlNet("edges", control, controlnet_conditioning_scale=0.5, control_guidance_end=0.8)]
        picture = await client.generate("a star", controlnets=nets)
        assert [use.name for use in picture.provenance.controlnets] == ["edges"]
    (net,) = worker.requests[0].spec.controlnets
    assert (net.image, net.controlnet_conditioning_scale, net.control_guidance_end) == (control.read_bytes(), 0.5, 0.8)
    worker.script.picture = lambda index: _png()
    drawn = await run_at(
        house, "generate", "a star", "-o", str(tmp_path / "star.png"), "--control", f"edges={control}:0.8"
    )
    assert drawn.exit_code == 0, drawn.output
    assert "control edges: by s1, scale 0.8, waited 0.250 s for it" in drawn.stdout


async def _said_by_the_doctor(house: Running) -> list[str]:
    results = await asyncio.to_thread(lambda: list(check_gateway(house.address, house.fleet_address)))
    return [result.what for result in results]


async def test_the_fleet_and_the_doctor_show_controlnet_servers(house: Running) -> None:
    await house.worker()
    await house.controlnets("s1", hosted("edges", sessions=3), hosted("depth", state=ON_DISK))
    result = await run_at(house, "fleet", "--once")
    assert result.exit_code == 0, result.output
    (row,) = (line for line in result.stdout.splitlines() if line.split()[:1] == ["s1"])
    assert "edges, depth (not loaded)" in row
    assert row.split("cpu")[1].split()[0] == "3", "its sessions"
    said = await _said_by_the_doctor(house)
    assert "1 ControlNet server joined, with depth, edges" in said
    await house.controlnets("s2", hosted("edges", digest="other"), hosted("pose", base="sdxl"))
    said = await _said_by_the_doctor(house)
    assert "ControlNet edges is served in more than one version" in said
    assert "no model that is served can be drawn with ControlNet pose" in said


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (32, 32), "red").save(buffer, "PNG")
    return buffer.getvalue()


async def test_what_is_wrong_with_a_control_image_is_said_by_its_name_and_file(house: Running, tmp_path: Path) -> None:
    await house.worker()
    await house.controlnets("s1", hosted("edges"), hosted("depth"))
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    good.write_bytes(_png())
    bad.write_bytes(_png()[:60])
    result = await run_at(house, "generate", "a star", "--control", f"edges={good}", "--control", f"depth={bad}:0.8")
    assert result.exit_code == 2
    assert f"--control depth={bad}: the image is not a complete, well-formed PNG" in result.stderr
