"""A gateway and two ControlNet servers as processes: a hot ControlNet gets a second server, and a pin lasts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import ControlNet
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADED
from tests.fakes.scripted_worker import MODEL
from tests.samples.controlnets import control_image
from tests.support.running_controlnets import ControlNetServer, House, png
from tests.support.running_gateway import running_gateway
from tests.support.services import Services
from tests.support.waiting import eventually

# It suits every ControlNet.
ANY = image_pb2.Model()
ANY.CopyFrom(MODEL)
ANY.base = ""
HOT = [ControlNet(name="edges", image=png(control_image(1)))] * 4


def is_loaded(server: ControlNetServer) -> bool:
    return server.hosted()["edges"].state == HOSTED_STATE_LOADED


async def test_a_hot_controlnet_is_replicated_and_a_pinned_one_loaded_again(tmp_path: Path) -> None:
    with Services(tmp_path) as services:
        house = House(services, tmp_path, {"edges": Path("miniature/edges")})
        async with running_gateway(codec_processes=1) as gateway:

            def start(name: str) -> ControlNetServer:
                return house.server(name, gateway=gateway.fleet_address, engine={"budget_bytes": 1 << 30})

            first, second = await asyncio.gather(asyncio.to_thread(start, "one"), asyncio.to_thread(start, "two"))
            assert first.pin("edges").pinned
            await eventually(lambda: is_loaded(first))
            assert not is_loaded(second)
            await gateway.worker(model=ANY, hold_at=1)
            # Jobs of few steps do not wait for a load by themselves.
            for number in range(2):
                await gateway.submit(prompt=f"star {number}", num_inference_steps=2, controlnets=HOT)
            await eventually(lambda: is_loaded(second), within_s=30)
            assert (first.hosted()["edges"].copied, second.hosted()["edges"].copied) == (False, True)
            first.service.stop()
            again = await asyncio.to_thread(start, "one")
            await eventually(lambda: is_loaded(again))
            assert again.hosted()["edges"].pinned
