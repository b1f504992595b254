"""Callers who want to hurt, each a process of its own: they send what is large, say nothing, or come by the thousand.

`python -m tests.support.flooders ADDRESS ATTACK SECONDS` is one of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from bottega.rpc.channel import channel_options
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec

_IMAGES = "/bottega.v1.ImageService"
# Of one message, a little below what a service takes.
_LARGE_BYTES = 23 << 20
_STOP_S = 10.0
# HTTP/2: kinds of frames.
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1

Message = tuple[str, bytes]
"""A method, and what it is asked."""


def tagged(number: int, content: bytes) -> bytes:
    """A field with bytes or a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def empty_loras(size_bytes: int = _LARGE_BYTES) -> Message:
    """A request of millions of empty messages."""
    return f"{_IMAGES}/SubmitJob", tagged(2, b"\x8a\x01\x00" * (size_bytes // 3))


def nested(size_bytes: int = _LARGE_BYTES) -> Message:
    """The same, each message with one in it, in a message that says itself again and again."""
    net = tagged(18, tagged(1, b""))  # a ControlNet with an empty name
    return f"{_IMAGES}/SubmitJob", tagged(2, tagged(21, b"") + net) * (size_bytes // 14)


def large_images() -> Message:
    """As many bytes of images as fit, of which none is one."""
    noise = os.urandom(7 << 20)
    spec = GenerationSpec(prompt="a star", image=noise, mask_image=noise, strength=0.5)
    spec.controlnets.append(ControlNet(name="edges", image=noise))
    return f"{_IMAGES}/SubmitJob", image_pb2.SubmitJobRequest(spec=spec).SerializeToString()


def unknown_fields(size_bytes: int = _LARGE_BYTES) -> Message:
    """A good request with a field that nobody knows."""
    spec = GenerationSpec(prompt="a star", num_inference_steps=2).SerializeToString() + tagged(900, bytes(size_bytes))
    return f"{_IMAGES}/SubmitJob", tagged(2, spec)


def large_id(size_bytes: int = _LARGE_BYTES) -> Message:
    """A small method with a large message."""
    return f"{_IMAGES}/GetJob", tagged(1, b"x" * size_bytes)


LARGE: Mapping[str, Callable[[], Message]] = {
    make.__name__: make for make in (empty_loras, nested, large_images, unknown_fields, large_id)
}


def _send_large(address: str, attack: str, seconds: float) -> int:
    """Sends the largest messages, several at once. Returns how many were answered."""
    method, raw = LARGE[attack]()
    ends, answered = time.monotonic() + seconds, 0
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        ask: Any = channel.unary_unary(method)
        while time.monotonic() < ends:
            for call in [ask.future(raw, timeout=30) for _ in range(3)]:
                with contextlib.suppress(grpc.RpcError):
                    call.result()
                answered += 1
    return answered


def _say_nothing(address: str, attack: str, seconds: float) -> int:
    """Opens streams, and says nothing on them. attack: silent:CALLS_A_SECOND."""
    pause_s = 1 / float(attack.partition(":")[2])
    ends, opened = time.monotonic() + seconds, []
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        submit: Any = channel.stream_stream(f"{_IMAGES}/SubmitJob")

        def never() -> Iterator[bytes]:
            time.sleep(max(0.0, ends - time.monotonic()))
            yield from ()

        while time.monotonic() < ends:
            opened.append(submit(never(), timeout=30))
            time.sleep(pause_s)
    return len(opened)


def _frame(kind: int, flags: int, stream: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + content


def _text(value: bytes) -> bytes:
    """A text of HPACK, as it is."""
    if len(value) < 0x7F:
        return bytes((len(value),)) + value
    return b"\x7f" + _varint(len(value) - 0x7F) + value


def _headers(method: str, metadata_bytes: int) -> bytes:
    """HPACK that leaves nothing in a table: POST, http, the path, and what gRPC wants."""
    fields = (
        b"\x83\x86\x04"
        + _text(method.encode())
        + b"\x01"
        + _text(b"gateway")
        + b"\x0f\x10"
        + _text(b"application/grpc")
        + b"\x00"
        + _text(b"te")
        + _text(b"trailers")
    )
    return fields + b"".join(b"\x00" + _text(b"x-more") + _text(b"y" * 4000) for _ in range(metadata_bytes // 4000))


def _call(method: str, stream: int, metadata_bytes: int) -> bytes:
    """A whole call with an empty message."""
    block, frames, kind = _headers(method, metadata_bytes), b"", _HEADERS
    while len(block) > 16_384:
        frames, block, kind = frames + _frame(kind, 0, stream, block[:16_384]), block[16_384:], 9
    return frames + _frame(kind, _END_HEADERS, stream, block) + _frame(_DATA, _END_STREAM, stream, bytes(5))


def burst(address: str, calls: int, *, source: str) -> socket.socket:
    """Open a connection and send so many calls without a key at once. Return it; it reads nothing."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=5, source_address=(source, 0))
    method = f"{_IMAGES}/GetJob"
    frames = [_call(method, 2 * number + 1, 0) for number in range(calls)]
    connection.sendall(PREFACE + _frame(_SETTINGS, _ACK, 0) + b"".join(frames))
    return connection


class _Connection:
    """A connection of HTTP/2 that reads nothing of what it is told."""

    def __init__(self, address: str, source: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=5, source_address=(source, 0))
        self._socket.sendall(PREFACE + _frame(_SETTINGS, _ACK, 0))
        self._socket.setblocking(False)
        self._unsent = b""
        self._stream = 1

    def send(self, frames: Callable[[int], bytes], count: int) -> bool:
        """Sends so many more, if what was to be sent has gone. False when the service has ended the connection."""
        try:
            with contextlib.suppress(BlockingIOError):
                while data := self._socket.recv(1 << 20):
                    del data
                return False
            if not self._unsent:
                self._unsent = b"".join(frames(self._stream + 2 * place) for place in range(count))
                self._stream += 2 * count
            _, writable, _ = select.select([], [self._socket], [], 0.001)
            if writable:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


def _flood(address: str, seconds: float, *, frames: Callable[[int], bytes], rate: float, connections: int) -> int:
    """Sends so many a second over so many connections, and opens another one for one that was ended. Returns that."""
    source, began, sent, ended = os.environ.get("FLOOD_FROM", "127.0.0.1"), time.monotonic(), 0.0, 0
    opened = [_Connection(address, source) for _ in range(connections)]
    while (passed := time.monotonic() - began) < seconds:
        due = passed * rate - sent
        if due < 10 * connections:
            time.sleep(0.001)
            continue
        count = int(min(due / connections, 200))
        for place, connection in enumerate(opened):
            if connection.send(frames, count):
                sent += count
                continue
            connection.close()
            ended += 1
            with contextlib.suppress(OSError):
                opened[place] = _Connection(address, source)
    return ended


def _call_unknown(address: str, attack: str, seconds: float) -> int:
    """Calls without a key. attack: strangers:CALLS_A_SECOND:CONNECTIONS:METADATA_BYTES."""
    rate, connections, metadata_bytes = map(int, attack.split(":")[1:])
    # What differs is the number of the stream alone; frames are made once for each.
    method = f"{_IMAGES}/ListModels"
    return _flood(
        address,
        seconds,
        frames=lambda stream: _call(method, stream, metadata_bytes),
        rate=rate,
        connections=connections,
    )


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0)
"""How a connection of HTTP/2 begins."""

MEANINGLESS: Mapping[str, bytes] = {
    "pings": _frame(_PING, 0, 0, bytes(8)),
    "pongs": _frame(_PING, _ACK, 0, bytes(8)),
    "settings": _frame(_SETTINGS, 0, 0),
    "windows": _frame(8, 0, 0, b"\0\0\0\1"),
    "unknown": _frame(0xFA, 0, 0, bytes(8)),
}
"""Frames that a client may send as often as it likes, as far as HTTP/2 goes, by name."""


def _send_meaningless(address: str, attack: str, seconds: float) -> int:
    """Frames that mean nothing. attack: FRAMES:A_SECOND. Returns how often the connection was ended."""
    kind, _, rate = attack.partition(":")
    frame = MEANINGLESS[kind]
    return _flood(address, seconds, frames=lambda _: frame, rate=float(rate), connections=1)


def attack(address: str, name: str, seconds: float) -> int:
    """One attack; what its number means its function says."""
    if name in LARGE:
        return _send_large(address, name, seconds)
    kind = name.partition(":")[0]
    if kind in MEANINGLESS:
        return _send_meaningless(address, name, seconds)
    return {"silent": _say_nothing, "strangers": _call_unknown}[kind](address, name, seconds)


async def cancel_at_once(begin: Callable[[str], Any], count: int) -> None:
    """Begin so many calls, and cancel each within milliseconds. begin: returns a call for a prompt."""
    for number in range(count):
        call = begin(f"a star {number}")
        await asyncio.sleep(0.0005 * (number % 12))
        call.cancel()


@contextlib.contextmanager
def flooding(
    address: str, attacks: Sequence[str], *, seconds: float, source: str = "127.0.0.1", to_the_end: bool = True
) -> Iterator[list[int]]:
    """Attackers at work in the block. Yields what they return, once it has ended.

    to_the_end: the block ends after them; otherwise they end with it.
    """
    command = [sys.executable, "-m", "tests.support.flooders", address]
    environment = {**os.environ, "FLOOD_FROM": source}
    processes = [
        subprocess.Popen([*command, each, str(seconds)], stdout=subprocess.PIPE, env=environment) for each in attacks
    ]
    results: list[int] = []
    try:
        yield results
        for process in processes if to_the_end else ():
            out, _ = process.communicate(timeout=seconds + _STOP_S)
            results.append(int(out))
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=_STOP_S)


if __name__ == "__main__":
    print(attack(sys.argv[1], sys.argv[2], float(sys.argv[3])), flush=True)
