"""What large images cost a gateway: it works in memory that it keeps, not in fresh pages each time."""

from __future__ import annotations

import io
import statistics
from pathlib import Path

import numpy as np
from PIL import Image

from bottega.rpc.channel import open_channel
from bottega.v1 import image_pb2, image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from tests.running import Services, gateway_config
from tests.service.scripted_worker import ScriptedWorker

ORDERS = 12


def _large_png() -> bytes:
    """8 MiB of noise."""
    pixels = np.random.default_rng(1).integers(0, 256, (1660, 1660, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=0)
    return out.getvalue()


def _page_faults(pid: int) -> int:
    """Pages that the process was given so far without reading a disk (proc(5), minflt)."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[7])


async def test_a_large_image_is_handled_in_memory_that_the_one_before_left(tmp_path: Path) -> None:
    image, faults = _large_png(), []
    spec = GenerationSpec(prompt="a star", num_inference_steps=4, image=image, strength=1.0)
    with Services(tmp_path) as services:
        gateway = services.start("bottega.gateway", gateway_config())
        worker = await ScriptedWorker("w1", gateway.address).start()
        async with open_channel(gateway.address) as channel:
            images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
            for _ in range(ORDERS):
                before = _page_faults(gateway.process.pid)
                events = [answer.event async for answer in images.Generate(image_pb2.GenerateRequest(spec=spec))]
                assert events[-1].HasField("completed")
                faults.append(_page_faults(gateway.process.pid) - before)
        await worker.die()
    # The image itself has 2000 pages, and some ten copies of it are made on its way.
    assert statistics.median(faults[ORDERS // 2 :]) < 6000, faults
