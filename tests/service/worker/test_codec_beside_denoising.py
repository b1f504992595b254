"""Codec work never holds denoising up: pictures go on while an edit of 4096 x 4096 pixels is decoded and encoded."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter

import pytest
from PIL import Image

from bottega.client import AsyncClient, Client, Progress
from tests.samples.hostile_images import saved
from tests.support.services import SMALL_ENGINE, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

# Its edits keep both cores at work.
pytestmark = pytest.mark.alone

SIDE = 4096
STEPS = 60
# Between two words on how far a picture is.
LONGEST_GAP_S = 0.6
# The same as a part of what the quicker codec takes: one that held denoising up would make a gap of all of it.
LONGEST_GAP = 0.6
_JOIN_S = 60.0
_TIMEOUT_S = 120.0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    with Services(tmp_path) as services:
        gateway = services.start(
            "gateway", gateway_config(codec_processes=1, codec_idle_s=None, max_image_pixels=SIDE * SIDE)
        )
        services.start(
            "worker",
            worker_config(
                gateway.fleet,
                name="worker",
                engine={**SMALL_ENGINE, "progress_interval_s": 0.05},
                codec_idle_s=None,
            ),
        )
        with Client(gateway.address) as client:
            wait_until(lambda: bool(client.models()), "the worker to join", within_s=_JOIN_S)
        yield gateway.address


def _large_edit() -> tuple[bytes, bytes]:
    """An image and a mask whose PNGs take a while: noise, enlarged to blocks."""
    noise = Image.frombytes("RGB", (256, 256), random.Random(0).randbytes(256 * 256 * 3)).resize(
        (SIDE, SIDE), Image.Resampling.NEAREST
    )
    mask = Image.new("L", (SIDE, SIDE))
    mask.paste(255, (0, 0, SIDE // 2, SIDE // 2))
    return saved(noise), saved(mask)


async def _longest_gap_s(client: AsyncClient, seed: int) -> float:
    """Seconds from step to step of a picture, at most."""
    times = [
        perf_counter()
        async for event in client.stream("a big red star", seed=seed, num_inference_steps=STEPS, width=64, height=64)
        if isinstance(event, Progress)
    ]
    return max(later - earlier for earlier, later in pairwise(times))


async def test_a_picture_goes_on_while_large_edits_are_read_and_written(address: str) -> None:
    image, mask = await asyncio.to_thread(_large_edit)
    gaps_s: list[float] = []
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as client:
        await _longest_gap_s(client, 0)  # what is made once
        began_s = perf_counter()
        await _longest_gap_s(client, 1)
        alone_s = perf_counter() - began_s
        editing = asyncio.create_task(
            client.edit(image, mask, "a dog", seed=999, num_inference_steps=1, strength=1.0, width=64, height=64)
        )

        async def draw_on(seed: int) -> None:
            while not editing.done():
                gaps_s.append(await _longest_gap_s(client, seed))

        # One begins in the middle of the other: of a moment at which nothing is drawn, no gap would tell.
        first = asyncio.create_task(draw_on(2))
        await asyncio.sleep(alone_s / 2)
        await asyncio.gather(first, draw_on(3), editing)
    seconds = {each.stage: each.seconds for each in editing.result().provenance.times}
    codec_s = min(seconds["decode_image"], seconds["encode_image"])
    assert max(gaps_s) < min(LONGEST_GAP_S, LONGEST_GAP * codec_s), (gaps_s, codec_s)
