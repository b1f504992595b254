"""Two gateways and ControlNet servers as processes, which share what they have in PostgreSQL."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from bottega import kinds
from bottega.errors import ControlNetNotFound
from bottega.miniature import WEIGHTS
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.controlnet_pb2 import ControlNetPlacements
from bottega.v1.generation_pb2 import ControlNet
from tests.fakes.scripted_worker import MODEL
from tests.samples.controlnets import control_image
from tests.support.running_controlnets import ControlNetServer, House, png
from tests.support.running_gateway import Running, refusal
from tests.support.services import Services
from tests.support.sharing_gateways import sharing_gateways
from tests.support.waiting import eventually

# It suits every ControlNet.
ANY = image_pb2.Model()
ANY.CopyFrom(MODEL)
ANY.base = ""


async def _listed(house: Running) -> dict[str, str]:
    """Digests of the ControlNets that callers of a gateway may name."""
    request = image_pb2.ListAdaptersRequest(kind=image_pb2.ADAPTER_KIND_CONTROLNET)
    adapters = (await house.images.ListAdapters(request, timeout=20)).adapters
    return {adapter.name: adapter.digest for adapter in adapters}


@pytest.mark.slow
async def test_a_controlnet_added_at_one_server_outlives_it_and_the_scheduler(pictures: str, tmp_path: Path) -> None:
    shutil.copytree(WEIGHTS / "controlnets" / "edges", tmp_path / "root" / "lines")
    lines, other = (ControlNet(name=name, image=png(control_image(1))) for name in ("lines", "other"))
    with Services(tmp_path) as services:
        async with sharing_gateways(objects=pictures, worker={"model": ANY}, codec_processes=1) as both:
            addresses = f"{both.scheduler.fleet_address},{both.follower.fleet_address}"

            def start(name: str) -> ControlNetServer:
                return House(services, tmp_path, {}).server(
                    name, gateway=addresses, root=str(tmp_path / "root"), database=both.url
                )

            first = await asyncio.to_thread(start, "one")
            digest = (await asyncio.to_thread(first.add, "lines", "lines")).digest
            second = await asyncio.to_thread(start, "two")  # it has joined after the call
            await eventually(lambda: {name: net.digest for name, net in second.hosted().items()} == {"lines": digest})
            first.service.kill()
            await eventually(lambda: _hosts_alone(both.follower, "two"))
            for house in (both.scheduler, both.follower):
                assert await _listed(house) == {"lines": digest}
            await refusal(lambda: both.follower.submit(prompt="a star", controlnets=[other]), ControlNetNotFound)
            jobs = [await both.follower.submit(prompt="a star", controlnets=[lines])]
            assert (await both.scheduler.ended(jobs[0].job_id)).state == image_pb2.JOB_STATE_COMPLETED
            await both.scheduler.stop_early()
            await eventually(lambda: both.follower.gateway._role.serves)
            jobs.append(await both.follower.submit(prompt="a moon", controlnets=[lines]))
            assert (await both.follower.ended(jobs[1].job_id)).state == image_pb2.JOB_STATE_COMPLETED
            assert await _listed(both.follower) == {"lines": digest}
    for request in both.worker.requests:
        (placed,) = ControlNetPlacements.FromString(request.addons[kinds.CONTROLNET]).hosts
        assert (placed.digest, [server.name for server in placed.servers]) == (digest, ["two"])
    assert len(both.worker.requests) == 2


async def _hosts_alone(house: Running, name: str) -> bool:
    """Whether one server hosts ControlNets, as a gateway says."""
    members = (await house.fleet.ListMembers(fleet_pb2.ListMembersRequest(), timeout=20)).members
    return [member.registration.name for member in members if member.load.hosted] == [name]
