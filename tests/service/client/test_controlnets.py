"""`bottega controlnets` and the SDK's part in it, against a real gateway with scripted workers and servers."""

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
from bottega.manifest import VARIABLE
from bottega.v1.hosted_pb2 import ResidualProfile
from tests.fakes.scripted_controlnet import ON_DISK, hosted
from tests.fakes.scripted_worker import MODEL
from tests.support.running_gateway import Running, running_gateway
from tests.support.terminal import run_at
from tests.support.waiting import eventually

PROFILE = ("controlnets", "profile")


@pytest.fixture
async def fleet() -> AsyncIterator[Running]:
    async with running_gateway() as running:
        yield running


@pytest.fixture
async def house() -> AsyncIterator[Running]:
    """One that can look at images."""
    async with running_gateway(codec_processes=1) as running:
        yield running


async def _served(house: Running) -> tuple[ServedControlNet, ...]:
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
        return await client.controlnets()


async def test_controlnets_are_listed_with_size_model_and_where_they_are_loaded(fleet: Running) -> None:
    await fleet.worker()
    size = 24 << 20
    await fleet.controlnets("s1", hosted("edges", size_bytes=size, popularity=3), hosted("depth", state=ON_DISK))
    await fleet.controlnets("s2", hosted("edges", size_bytes=size, popularity=4), hosted("pose", base="sdxl"))
    await fleet.controlnets("s3", hosted("union", control_modes=6))
    depth, edges, pose, union = await _served(fleet)
    assert [net.control_modes for net in (edges, union)] == [0, 6]
    assert (edges.name, edges.models, edges.popularity, edges.loaded_at) == ("edges", ("miniature",), 7, ("s1", "s2"))
    assert (depth.loaded_at, pose.models) == ((), ())
    for listing in (("controlnets",), ("controlnets", "list")):
        result = await run_at(fleet, *listing)
        assert result.exit_code == 0
        rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.strip()}
        assert rows["edges"].split() == ["edges", "-", "24", "MiB", "miniature", "s1,", "s2", "2", "7", "-"]
        assert "openpose, depth, hed, canny, normal, segment" in rows["union"]
        assert "-" in rows["depth"]
        assert "no served model (sdxl)" in rows["pose"]


async def test_a_folder_is_added_at_every_server_or_at_one(fleet: Running, tmp_path: Path) -> None:
    first = await fleet.controlnets("s1", hosted("edges"))
    second = await fleet.controlnets("s2", hosted("edges"))
    result = await run_at(fleet, "controlnets", "add", "depth", "nets/depth")
    assert result.exit_code == 0, result.output
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == ["s1 hosts depth", "s2 hosts depth"]
    assert first.added == second.added == [("depth", "nets/depth")]
    result = await run_at(fleet, "controlnets", "add", "pose", str(tmp_path), "--server", "s2")
    assert result.exit_code == 0
    assert (first.added[1:], second.added[1:]) == ([], [("pose", str(tmp_path))])

    async def listed() -> bool:
        return [net.name for net in await _served(fleet)] == ["depth", "edges", "pose"]

    await eventually(listed)
    unknown = await run_at(fleet, "controlnets", "add", "pose", "pose", "--server", "s9")
    assert unknown.exit_code == 2
    assert "joined: s1, s2" in unknown.stderr


async def test_one_of_the_servers_that_share_a_catalogue_is_asked_to_add(fleet: Running) -> None:
    servers = [await fleet.controlnets(name, hosted("edges")) for name in ("s1", "s2", "s3")]
    for server in servers[:2]:
        server.catalogue = "bottega/0c2f"
    servers[0].failure = errors.InvalidRequest("there is no such folder")
    result = await run_at(fleet, "controlnets", "add", "depth", "nets/depth")
    assert result.exit_code == 0, result.output
    assert [line.split(",")[0] for line in result.stdout.splitlines()] == ["s2 hosts depth", "s3 hosts depth"]
    assert "Other servers that share the catalogue bottega/0c2f host it soon, too." in result.stderr
    servers[0].failure = None
    await run_at(fleet, "controlnets", "add", "pose", "nets/pose")
    assert [[name for name, _ in server.added] for server in servers] == [["pose"], ["depth"], ["depth", "pose"]]
    servers[0].failure = servers[1].failure = errors.InvalidRequest("there is no such folder")
    result = await run_at(fleet, "controlnets", "add", "more", "nets/more")
    assert result.exit_code != 0
    assert "s1: there is no such folder" in result.stderr
    assert "s2: there is no such folder" in result.stderr


async def test_a_controlnet_is_loaded_by_as_many_servers_as_asked_for(fleet: Running) -> None:
    servers = [
        await fleet.controlnets(name, hosted("edges", state=ON_DISK), hosted("depth", size_bytes=size))
        for name, size in (("s1", 1 << 20), ("s2", 3 << 20), ("s3", 2 << 20))
    ]
    result = await run_at(fleet, "controlnets", "warm", "edges")
    assert (result.exit_code, result.stdout) == (0, "edges is loaded at s1\n"), "it has the most memory to spare"
    result = await run_at(fleet, "controlnets", "warm", "edges", "--servers", "2")
    assert (result.exit_code, result.stdout) == (0, "edges is loaded at s1, s3\n")
    assert [server.prefetched for server in servers] == [[["edges"], ["edges"]], [], [["edges"]]]
    result = await run_at(fleet, "controlnets", "warm", "edges", "--servers", "4")
    assert result.exit_code != 0
    assert "edges is hosted by 3 ControlNet servers, not by 4" in result.stderr
    result = await run_at(fleet, "controlnets", "warm", "nobody")
    assert result.exit_code != 0
    assert "nobody is not hosted by any ControlNet server" in result.stderr


async def _has_budget(house: Running) -> bool:
    async with AsyncClient(house.address, fleet_address=house.fleet_address) as client:
        return any(member.load.budget_bytes for member in (await client.fleet()).members)


async def test_a_load_that_cannot_succeed_ends_the_wait_with_its_reason(fleet: Running) -> None:
    small = await fleet.controlnets("s1", hosted("edges", state=ON_DISK, size_bytes=24 << 20))
    small.budget_bytes = 20 << 20
    assert small.membership is not None
    small.membership.report_soon()
    await eventually(lambda: _has_budget(fleet))
    result = await run_at(fleet, "controlnets", "warm", "edges")
    assert result.exit_code != 0
    assert "edges takes 24.0 MiB, and s1 has 20.0 MiB for ControlNets" in " ".join(result.output.split())
    assert not small.prefetched


async def test_a_controlnet_is_pinned_at_every_server_or_at_one(fleet: Running) -> None:
    first, second = [await fleet.controlnets(name, hosted("edges")) for name in ("s1", "s2")]
    result = await run_at(fleet, "controlnets", "pin", "edges")
    assert (result.exit_code, result.stdout) == (0, "edges is pinned at s1, s2\n")
    result = await run_at(fleet, "controlnets", "unpin", "edges", "--server", "s2")
    assert (result.exit_code, result.stdout) == (0, "edges is not pinned any more at s2\n")

    async def listed() -> bool:  # with the servers' next reports
        lines = (await run_at(fleet, "controlnets", "where", "edges")).stdout.splitlines()
        return [("loaded, pinned" in line) for line in lines if "127.0.0.1" in line] == [True, False]

    await eventually(listed)
    assert (first.nets["edges"].pinned, second.nets["edges"].pinned) == (True, False)
    result = await run_at(fleet, "controlnets", "pin", "edges", "--server", "s9")
    assert result.exit_code != 0
    assert "s1, s2" in result.stderr


async def test_a_server_that_refuses_or_is_gone_is_named_and_the_others_have_it(fleet: Running) -> None:
    for name in ("s1", "s2", "s3"):
        await fleet.controlnets(name, hosted("edges"))
    good, refuses, gone = fleet.servers
    refuses.failure = errors.ControlNetUnusable("ControlNet depth cannot be used: no weights in /srv/depth")
    await gone._server.grpc.stop(0)
    result = await run_at(fleet, "controlnets", "add", "depth", "/srv/depth")
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


async def test_the_fleet_and_the_doctor_show_controlnet_servers(
    fleet: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fleet.worker()
    await fleet.controlnets("s1", hosted("edges", sessions=3), hosted("depth", state=ON_DISK))
    result = await run_at(fleet, "fleet", "--once")
    assert result.exit_code == 0, result.output
    (row,) = (line for line in result.stdout.splitlines() if line.split()[:1] == ["s1"])
    assert "edges, depth (not loaded)" in row
    assert row.split("cpu")[1].split()[0] == "3", "its sessions"
    said = await _said_by_the_doctor(fleet)
    assert "1 ControlNet server joined, with depth, edges" in said
    await fleet.controlnets("s2", hosted("edges", digest="other"), hosted("pose", base="sdxl"))
    said = await _said_by_the_doctor(fleet)
    assert "the ControlNet edges is served in more than one version" in said
    assert "no served model can be drawn with the ControlNet pose" in said
    monkeypatch.setenv(VARIABLE, "/no/such/manifest")
    assert await _said_by_the_doctor(fleet) == said, "without a manifest that can be read, too"


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
    assert result.stdout == "depth: cosine 0.9931 from step to step, with 20 steps; kept by s1\n"
    assert "Requests of at least 20 steps that allow approximations" in result.stderr
    assert [(each.spec.prompt, each.spec.num_inference_steps, each.spec.seed) for each in worker.requests] == [
        ("a house", 20, 0),
        ("a house", 20, 1),
    ]
    assert all(each.spec.controlnets[0].measure_similarity for each in worker.requests)
    noted = ResidualProfile(model_hash=MODEL.model_hash, num_inference_steps=20, similarity=0.9931)
    assert list(first.nets["depth"].profiles) == [noted]
    assert not other.nets["edges"].profiles
    worker.script.similarity = 0.9899
    result = await run_at(house, *PROFILE, "depth", image)
    assert "This is below 0.99, so every step waits for its own residuals." in result.stderr


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
