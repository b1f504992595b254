"""Frames arrive whole, in order, within their limit, or not at all."""

from __future__ import annotations

import asyncio
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from bottega.errors import InternalError, Unavailable
from bottega.process.child import AsyncFramedPipe, FramedPipe, open_pair


@pytest.fixture
def pair() -> Iterator[tuple[FramedPipe, FramedPipe]]:
    left, right = (FramedPipe(end, max_frame_bytes=8 * 2**20) for end in open_pair())
    yield left, right
    left.close()
    right.close()


def test_frames_keep_their_order_and_their_bytes(pair: tuple[FramedPipe, FramedPipe]) -> None:
    left, right = pair
    sent = [b"", b"a", bytes(range(256)) * 8192, b"end"]

    def send_all() -> None:
        for frame in sent:
            left.send(frame)

    sender = threading.Thread(target=send_all)
    sender.start()
    assert [right.recv() for _ in sent] == sent
    sender.join()
    left.close()
    assert right.recv() is None


def test_frames_of_several_threads_do_not_mix(pair: tuple[FramedPipe, FramedPipe]) -> None:
    left, right = pair
    payloads = [bytes([i]) * 300_000 for i in range(4)]
    threads = [threading.Thread(target=left.send, args=(payload,)) for payload in payloads]
    for thread in threads:
        thread.start()
    received = {right.recv() for _ in payloads}
    for thread in threads:
        thread.join()
    assert received == set(payloads)


def test_a_frame_beyond_the_limit_is_not_sent(pair: tuple[FramedPipe, FramedPipe]) -> None:
    left, right = pair
    with pytest.raises(InternalError, match="limit of 8388608"):
        left.send(bytes(8 * 2**20 + 1))
    left.send(b"next")
    assert right.recv() == b"next"


def test_a_frame_that_says_it_is_beyond_the_limit_is_not_received() -> None:
    raw, end = open_pair()
    channel = FramedPipe(end, max_frame_bytes=1000)
    raw.sendall(struct.pack("<I", 1001))
    with pytest.raises(InternalError, match="1001 bytes"):
        channel.recv()
    raw.close()
    channel.close()


def test_half_a_frame_is_no_frame() -> None:
    raw, end = open_pair()
    raw.sendall(struct.pack("<I", 100) + b"only this")
    raw.close()
    channel = FramedPipe(end)
    assert channel.recv() is None
    channel.close()


def test_sending_to_a_closed_end_says_so(pair: tuple[FramedPipe, FramedPipe]) -> None:
    left, right = pair
    right.close()
    with pytest.raises(Unavailable):
        left.send(b"x")


async def test_an_asyncio_end_refuses_what_is_beyond_the_limit_both_ways() -> None:
    raw, end = open_pair()
    channel = AsyncFramedPipe(end, max_frame_bytes=1000)
    with pytest.raises(InternalError):
        await channel.send(bytes(1001))
    raw.sendall(struct.pack("<I", 2**32 - 1))
    with pytest.raises(InternalError):
        await channel.recv()
    with pytest.raises(Unavailable):
        await channel.send(b"after a lying header the channel is closed")
    raw.close()


async def test_a_cancelled_half_sent_frame_closes_the_channel() -> None:
    ours, theirs = open_pair()
    channel = AsyncFramedPipe(ours)
    sending = asyncio.create_task(channel.send(bytes(4 * 2**20)))
    await asyncio.sleep(0.05)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    with pytest.raises(Unavailable):
        await channel.send(b"x")
    theirs.close()


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            self.count += 1

    def stop(self) -> None:
        self._task.cancel()


async def test_a_long_frame_lets_the_event_loop_have_its_turns() -> None:
    ours, theirs = open_pair()
    channel = AsyncFramedPipe(ours)
    sender = threading.Thread(target=FramedPipe(theirs).send, args=(bytes(32 * 2**20),))
    turns = Turns()
    sender.start()
    frame = await channel.recv()
    turns.stop()
    sender.join()
    assert frame is not None
    assert len(frame) == 32 * 2**20
    assert turns.count > 50
    channel.close()
    theirs.close()


async def test_many_frames_at_once_let_the_event_loop_have_its_turns() -> None:
    ours, theirs = open_pair()
    channel, sender = AsyncFramedPipe(ours), FramedPipe(theirs)
    for _ in range(50):
        sender.send(b"beat")
    turns = Turns()
    assert [await channel.recv() for _ in range(50)] == [b"beat"] * 50
    turns.stop()
    assert turns.count >= 48
    channel.close()
    sender.close()


def test_closing_wakes_a_waiting_receiver(pair: tuple[FramedPipe, FramedPipe]) -> None:
    left, _right = pair
    received: list[bytes | None] = []
    waiting = threading.Thread(target=lambda: received.append(left.recv()))
    waiting.start()
    time.sleep(0.05)
    left.close()
    waiting.join(5)
    assert received == [None]


async def test_frames_that_come_together_or_in_pieces_are_told_apart() -> None:
    raw, end = open_pair()
    channel = AsyncFramedPipe(end)
    frames = [b"one", b"", bytes(range(256)) * 2048, b"two", b"x" * (64 << 10)]
    together = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    sender = asyncio.create_task(asyncio.to_thread(raw.sendall, together))
    assert [await channel.recv() for _ in frames] == frames
    await sender
    for piece in (struct.pack("<I", 5)[:2], struct.pack("<I", 5)[2:] + b"ab", b"cde" + struct.pack("<I", 9) + b"half"):
        raw.sendall(piece)
        await asyncio.sleep(0.01)
    assert await channel.recv() == b"abcde"
    raw.close()
    assert await channel.recv() is None
    channel.close()
