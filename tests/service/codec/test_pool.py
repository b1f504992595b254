"""The pool serves images from its processes, and heals when one dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from PIL import Image

from bottega.codec import ImageSize, Pixels
from bottega.codec.pool import CodecPool
from bottega.errors import BadImage, Code, InternalError, QueueFull, Unavailable
from bottega.fair_order import Share
from bottega.process.child import ChildProcess, FramedPipe, open_pair
from bottega.v1 import codec_pb2, generation_pb2
from tests.samples import hostile_images as hostile
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PNG = generation_pb2.IMAGE_FORMAT_PNG


def png(width: int, height: int) -> bytes:
    return hostile.saved(Image.new("RGB", (width, height), "teal"))


@contextlib.asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[CodecPool]:
    pool = CodecPool(**settings)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


@contextlib.asynccontextmanager
async def clock_of_work(pool: CodecPool) -> AsyncIterator[None]:
    """In the block, the loop's clock counts the processor time of the pool's process, until that process is gone.

    So a deadline passes after the process has worked for so long, however busy the machine is.
    """
    loop, process = asyncio.get_running_loop(), psutil.Process(pool.pids[0])
    began_s, used = loop.time(), process.cpu_times()

    def work_s() -> float:
        with contextlib.suppress(psutil.NoSuchProcess):
            now = process.cpu_times()
            return began_s + float(now.user + now.system - used.user - used.system)
        return time.monotonic()

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(loop, "time", work_s)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[CodecPool]:
    async with running(processes=1, deadline_s=10, max_waiting=4) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def fresh() -> AsyncIterator[CodecPool]:
    async with running(processes=1, deadline_s=10, max_waiting=4) as pool:
        yield pool


async def test_the_pool_inspects_decodes_and_encodes(pool: CodecPool) -> None:
    assert await pool.inspect(png(30, 20)) == ImageSize(width=30, height=20)
    pixels = (await pool.decode(png(30, 20), 16, 8)).pixels
    assert (pixels.width, pixels.height) == (16, 8)
    encoded = await pool.encode(pixels, PNG, 90, {"bottega": "{}"})
    assert (await pool.decode(encoded.data)).pixels == pixels
    assert encoded.seconds > 0
    assert encoded.began_s > 0


async def test_a_refusal_is_bad_image_and_the_process_stays(pool: CodecPool) -> None:
    before = pool.pids
    with pytest.raises(BadImage, match="not a PNG, JPEG or WebP image"):
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


async def test_processes_that_end_when_idle_start_with_the_first_call_and_again_with_the_next() -> None:
    async with running(idle_s=0.2) as pool:
        assert not pool.pids
        for _ in range(2):
            assert await pool.inspect(png(3, 2)) == ImageSize(width=3, height=2)
            assert len(pool.pids) == 1
            await eventually(lambda: not pool.pids)


async def test_a_process_killed_while_idle_costs_no_call(pool: CodecPool) -> None:
    before = pool.pids
    os.kill(before[0], signal.SIGKILL)
    assert await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)
    assert pool.pids != before


async def test_a_process_that_stands_still_is_replaced_and_its_call_is_served_by_another() -> None:
    async with running(processes=1, deadline_s=2) as pool:
        before = pool.pids
        os.kill(before[0], signal.SIGSTOP)
        waiting = [asyncio.create_task(pool.inspect(png(3, side))) for side in (3, 4)]
        assert await asyncio.gather(*waiting) == [ImageSize(width=3, height=side) for side in (3, 4)]
        assert pool.pids != before
        assert not psutil.pid_exists(before[0])


async def test_an_image_that_no_process_gets_to_in_time_is_unavailable_and_not_bad(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ChildProcess.start

    async def start_and_stop_at_calls(*arguments: Any, **options: Any) -> ChildProcess:
        """Every process stands still from its first call on."""
        child = await start(*arguments, **options)
        send = child.channel.send

        async def send_to_stopped(frame: bytes) -> None:
            os.kill(child.pid, signal.SIGSTOP)
            await send(frame)

        monkeypatch.setattr(child.channel, "send", send_to_stopped)
        return child

    monkeypatch.setattr(ChildProcess, "start", start_and_stop_at_calls)
    async with running(processes=1, deadline_s=0.3) as pool:
        with pytest.raises(Unavailable, match=r"no codec process finished the image within 0\.3 s") as raised:
            await pool.inspect(png(3, 3))
        assert raised.value.code is Code.UNAVAILABLE
    replaced = [record for record in caplog.records if record.getMessage() == "a child process was lost during a call"]
    assert [record.why for record in replaced] == ["stood still"] * 2  # type: ignore[attr-defined]


async def test_an_image_that_keeps_its_process_busy_beyond_the_deadline_is_bad(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(processes=1, deadline_s=0.4) as pool, clock_of_work(pool):
        with pytest.raises(BadImage, match=r"more than 0\.4 s"):
            await pool.decode(hostile.png_of(4096, 4096), 4096, 4096)
        assert await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)
    assert len(caplog.records) == 1, "it is not tried again"


async def test_an_image_that_reaches_the_limit_of_processor_time_is_bad_and_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running(processes=1) as pool:
        (pid,) = pool.pids
        os.kill(pid, signal.SIGSTOP)
        call = asyncio.create_task(pool.inspect(png(3, 3)))
        await asyncio.sleep(0.05)
        os.kill(pid, signal.SIGPROF)  # as the limit does
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(BadImage, match="more processor time"):
            await call
        assert await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)
    assert len(caplog.records) == 1, "it is not tried again"


async def test_decoding_has_a_limit_of_processor_time_that_ends_the_process() -> None:
    ours, theirs = open_pair()
    script = "import bottega.codec.process as process; process.DECODE_CPU_S = 0.2; process.main()"
    command = [sys.executable, "-c", script, "--fd", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=(theirs.fileno(),)) as process:  # noqa: ASYNC220 - nothing waits here
        theirs.close()
        channel = FramedPipe(ours)
        assert channel.recv() is not None
        decode = codec_pb2.CodecDecode(image=hostile.png_of(4096, 4096), width=8, height=8)
        channel.send(codec_pb2.CodecCall(decode=decode).SerializeToString())
        assert channel.recv() is None
        assert process.wait(10) == -signal.SIGPROF


async def test_a_tenant_with_one_image_waits_for_one_of_a_tenant_that_floods() -> None:
    async with running(processes=1) as pool:
        large, ended = hostile.png_of(2064, 2048), list[str]()

        async def look(tenant: str) -> None:
            await pool.inspect(large, share=Share(tenant=tenant))
            ended.append(tenant)

        tasks = [asyncio.create_task(look("flood")) for _ in range(6)]
        await asyncio.sleep(0)
        await asyncio.gather(*tasks, look("one"))
    assert ended[1] == "one"


async def test_large_images_leave_a_process_to_small_ones() -> None:
    async with running(processes=2, max_waiting=8) as pool:
        large = hostile.png_of(2064, 2048)
        pids = pool.pids
        for pid in pids[1:]:
            os.kill(pid, signal.SIGSTOP)
        calls: list[asyncio.Task[ImageSize]] = []
        while len(calls) < 5:  # one is served, four wait
            calls.append(asyncio.create_task(pool.inspect(large)))
            await asyncio.sleep(0.05)
        with pytest.raises(QueueFull):
            await pool.inspect(large)
        for _ in range(20):
            assert await asyncio.wait_for(pool.inspect(png(3, 3)), 30) == ImageSize(width=3, height=3)
        assert not any(call.done() for call in calls)
        for pid in pids[1:]:
            os.kill(pid, signal.SIGCONT)
        assert await asyncio.gather(*calls) == [ImageSize(width=2064, height=2048)] * 5
        assert pool.pids == pids


async def test_who_does_not_wait_any_more_keeps_no_room(pool: CodecPool) -> None:
    busy = await _busy(pool, 5)
    for call in busy[1:]:
        call.cancel()
    await asyncio.gather(*busy[1:], return_exceptions=True)
    again = [asyncio.create_task(pool.inspect(png(3, 3))) for _ in range(4)]
    await asyncio.sleep(0.05)
    await _go_on(pool, busy[:1])
    assert await asyncio.gather(*again) == [ImageSize(width=3, height=3)] * 4


async def test_a_call_that_kills_every_process_fails_alone(pool: CodecPool) -> None:
    with pytest.raises(InternalError):  # a keyword that no PNG can carry ends the process
        await pool.encode(Pixels(width=8, height=8, data=bytes(192)), PNG, 90, {"\u661f": "y"})
    assert await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)


async def test_memory_is_bounded(pool: CodecPool) -> None:
    assert psutil.Process(pool.pids[0]).rlimit(psutil.RLIMIT_AS) == (2**30, 2**30)


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


async def test_a_full_queue_says_when_to_come_back_by_what_calls_take(fresh: CodecPool) -> None:
    began_s = time.monotonic()
    busy = await _busy(fresh, 1)
    await asyncio.sleep(1.5)
    await _go_on(fresh, busy)
    took_s = time.monotonic() - began_s
    busy = await _busy(fresh, 5)
    shortest_s, longest_s = await _told_s(fresh)
    assert 1.5 <= shortest_s < longest_s < 1.5 * took_s + 0.5
    await _go_on(fresh, busy)
    for _ in range(16):
        await fresh.inspect(png(3, 3))
    busy = await _busy(fresh, 5)
    assert (await _told_s(fresh))[1] < longest_s / 2
    await _go_on(fresh, busy)


async def test_a_full_queue_of_which_nothing_was_served_yet_says_the_deadline_of_a_call(fresh: CodecPool) -> None:
    busy = await _busy(fresh, 5)
    shortest_s, longest_s = await _told_s(fresh)
    assert 10 <= shortest_s < longest_s <= 15
    await _go_on(fresh, busy)


async def test_a_call_waits_for_its_turn_within_a_bound(caplog: pytest.LogCaptureFixture) -> None:
    async with running(processes=1, deadline_s=10, max_wait_s=0.3) as pool:
        served, *waiting = await _busy(pool, 3)
        for error in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 8):
            assert isinstance(error, QueueFull)
            assert error.metadata["limit"] == "codec_queue"
        assert not served.done(), "one that a process has begun with has the whole deadline"
        os.kill(pool.pids[0], signal.SIGCONT)
        assert await served == await pool.inspect(png(3, 3)) == ImageSize(width=3, height=3)
        assert not caplog.records


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


async def test_calls_that_come_while_the_processes_start_wait_for_them() -> None:
    """As those of clients that were there before the gateway."""
    pool = CodecPool(processes=2)
    try:
        async with asyncio.timeout(20):
            starting = asyncio.create_task(pool.start())
            await asyncio.sleep(0)
            sizes = await asyncio.gather(*(pool.inspect(png(3 + number, 3)) for number in range(6)))
            await starting
        assert sizes == [ImageSize(width=3 + number, height=3) for number in range(6)]
        pids = pool.pids
        assert len(pids) == 2
        running = {child.pid for child in psutil.Process().children() if "bottega.codec.process" in child.cmdline()}
        assert set(pids) <= running
    finally:
        await pool.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids)
