"""The pool serves images from its processes, and heals when one dies or hangs."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import sys
from collections.abc import AsyncIterator

import psutil
import pytest
from PIL import Image

from bottega.codec import CodecPool, ImageSize, Pixels
from bottega.errors import BadImage, InternalError, QueueFull, Unavailable
from bottega.v1 import generation_pb2

PNG = generation_pb2.IMAGE_FORMAT_PNG


def png(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(out, "PNG")
    return out.getvalue()


@pytest.fixture
async def pool() -> AsyncIterator[CodecPool]:
    pool = CodecPool(processes=1, deadline_s=10, max_waiting=4)
    await pool.start()
    yield pool
    await pool.stop()


async def test_the_pool_inspects_decodes_and_encodes(pool: CodecPool) -> None:
    assert await pool.inspect(png(30, 20)) == ImageSize(width=30, height=20)
    pixels = await pool.decode(png(30, 20), 16, 8)
    assert (pixels.width, pixels.height) == (16, 8)
    encoded = await pool.encode(pixels, PNG, 90, {"bottega": "{}"})
    assert await pool.decode(encoded.data) == pixels
    assert encoded.seconds > 0
    assert encoded.began_s > 0


async def test_large_images_pass(pool: CodecPool) -> None:
    pixels = await pool.decode(png(1500, 1000), 2048, 2048)
    assert len(pixels.data) == 2048 * 2048 * 3
    encoded = await pool.encode(pixels, PNG, 90, {})
    assert await pool.inspect(encoded.data) == ImageSize(width=2048, height=2048)


async def test_a_refusal_is_bad_image_and_the_process_stays(pool: CodecPool) -> None:
    before = pool.pids
    with pytest.raises(BadImage, match="no PNG, JPEG or WebP image"):
        await pool.inspect(b"not an image")
    assert await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)
    assert pool.pids == before


async def test_nothing_is_kept_of_an_image_until_the_next_one(pool: CodecPool) -> None:
    image, noise = png(300, 200), os.urandom(1 << 20)
    here = sys.getrefcount(noise)
    await pool.inspect(image)
    assert sys.getrefcount(image) == here
    with pytest.raises(BadImage):
        await pool.inspect(noise)
    gc.collect()  # the exception leads to the frames that it came through
    assert sys.getrefcount(noise) == here


async def test_a_process_killed_while_idle_costs_no_call(pool: CodecPool) -> None:
    before = pool.pids
    os.kill(before[0], signal.SIGKILL)
    assert await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)
    assert pool.pids != before


async def test_a_hung_process_is_replaced_and_only_its_call_fails() -> None:
    pool = CodecPool(processes=1, deadline_s=0.5)
    await pool.start()
    before = pool.pids
    os.kill(before[0], signal.SIGSTOP)
    hung = asyncio.create_task(pool.inspect(png(3, 3)))
    await asyncio.sleep(0.05)
    waiting = asyncio.create_task(pool.inspect(png(4, 4)))
    with pytest.raises(BadImage, match=r"0\.5 s"):
        await hung
    assert await waiting == ImageSize(width=4, height=4)
    assert pool.pids != before
    assert not psutil.pid_exists(before[0])
    await pool.stop()


async def test_a_call_that_kills_every_process_fails_alone(pool: CodecPool) -> None:
    with pytest.raises(InternalError):  # a keyword that no PNG can carry ends the process
        await pool.encode(Pixels(width=8, height=8, data=bytes(192)), PNG, 90, {"\u661f": "y"})
    assert await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)


async def test_memory_is_bounded(pool: CodecPool) -> None:
    child = psutil.Process(pool.pids[0])
    assert child.rlimit(psutil.RLIMIT_AS) == (2**30, 2**30)


async def test_waiting_calls_are_bounded(pool: CodecPool) -> None:
    os.kill(pool.pids[0], signal.SIGSTOP)
    calls = [asyncio.create_task(pool.inspect(png(3, 3))) for _ in range(5)]
    await asyncio.sleep(0.05)  # one is served, four wait
    calls += [asyncio.create_task(pool.inspect(png(3, 3))) for _ in range(3)]
    await asyncio.sleep(0.05)
    assert sum(call.done() and isinstance(call.exception(), QueueFull) for call in calls) in {2, 3}
    os.kill(pool.pids[0], signal.SIGCONT)
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert results.count(ImageSize(width=3, height=3)) >= 5


async def _busy(pool: CodecPool, calls: int) -> list[asyncio.Task[ImageSize]]:
    """Its process has stopped in the first of so many calls, and the others wait."""
    os.kill(pool.pids[0], signal.SIGSTOP)
    tasks: list[asyncio.Task[ImageSize]] = []
    while len(tasks) < calls:
        tasks.append(asyncio.create_task(pool.inspect(png(3, 3))))
        await asyncio.sleep(0.02)
    return tasks


async def _told_s(pool: CodecPool) -> tuple[float, float]:
    """The shortest and the longest time after which those who are refused shall come back."""
    told: list[float] = []
    for _ in range(50):
        with pytest.raises(QueueFull) as raised:
            await pool.inspect(png(3, 3))
        assert raised.value.metadata["limit"] == "codec_queue", "by which the SDK knows that asking again soon helps"
        assert raised.value.retry_after_s is not None
        told.append(raised.value.retry_after_s)
    assert len(set(told)) > 10, "who is refused together shall not come back together"
    return min(told), max(told)


async def _go_on(pool: CodecPool, busy: list[asyncio.Task[ImageSize]]) -> None:
    os.kill(pool.pids[0], signal.SIGCONT)
    await asyncio.gather(*busy)


async def test_a_full_queue_says_when_to_come_back_by_what_calls_take(pool: CodecPool) -> None:
    busy = await _busy(pool, 1)
    await asyncio.sleep(1.5)
    await _go_on(pool, busy)
    busy = await _busy(pool, 5)
    shortest_s, longest_s = await _told_s(pool)
    assert 1.5 <= shortest_s < longest_s < 3.5
    await _go_on(pool, busy)
    for _ in range(16):
        await pool.inspect(png(3, 3))
    busy = await _busy(pool, 5)
    assert (await _told_s(pool))[1] <= 0.75
    await _go_on(pool, busy)


async def test_a_full_queue_of_which_nothing_was_served_yet_says_the_deadline_of_a_call(pool: CodecPool) -> None:
    busy = await _busy(pool, 5)
    shortest_s, longest_s = await _told_s(pool)
    assert 10 <= shortest_s < longest_s <= 15
    await _go_on(pool, busy)


async def test_a_call_waits_for_its_turn_within_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    pool = CodecPool(processes=1, deadline_s=10, max_wait_s=0.3)
    await pool.start()
    try:
        served, *waiting = await _busy(pool, 3)
        for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 2):
            assert isinstance(error, QueueFull)
            assert error.metadata["limit"] == "codec_queue"
        assert not served.done(), "one that a process has begun with has the whole deadline"
        os.kill(pool.pids[0], signal.SIGCONT)
        assert await served == await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)
        assert not caplog.records
    finally:
        await pool.stop()


async def test_stopping_ends_the_processes_and_fails_what_waits() -> None:
    pool = CodecPool(processes=2)
    await pool.start()
    pids = pool.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    calls = [asyncio.create_task(pool.inspect(png(3, 3))) for _ in range(4)]
    await asyncio.sleep(0.05)
    await pool.stop()
    assert all(isinstance(result, Unavailable) for result in await asyncio.gather(*calls, return_exceptions=True))
    assert not any(psutil.pid_exists(pid) for pid in pids)
