"""The ways to move a message that the transport bench compares: each moves one, and returns when it is acknowledged.

Each has a process of its own at the other end, except memcpy: `python -m load.bench.transport_ways WAY` takes messages
by one way and acknowledges each, and speaks lines of JSON on stdin and stdout.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from bottega.errors import LinkError
from bottega.transport import (
    Backend,
    Deadline,
    DType,
    Endpoints,
    Layout,
    Limits,
    Link,
    LinkListener,
    TensorSpec,
    connect,
    offer_from_wire,
    offer_to_wire,
)
from bottega.transport.memory import address, copy, private_slot
from bottega.v1.link_pb2 import LinkOffer

LIMITS = Limits(slots=2, slot_bytes=128 << 20)
SERVICE = "bench.Transport"
GRPC_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
ACK = b"\1"
_SERVE_S = 600.0
CHUNK_BYTES = 2 << 20
_TENSORS = 10
_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Tensors to move, in memory of their own, and where memcpy puts them."""

    layout: Layout
    buffers: list[memoryview]
    targets: list[memoryview]

    @classmethod
    def of(cls, size_bytes: int) -> Message:
        """Return ten tensors, or one of up to 4 KiB, every page touched."""
        count = _TENSORS if size_bytes > 4096 else 1
        part = size_bytes // count // 64 * 64
        sizes = [part] * (count - 1) + [size_bytes - part * (count - 1)]
        specs = [TensorSpec(name=f"residual {i}", dtype=DType.UINT8, shape=(size,)) for i, size in enumerate(sizes)]
        layout = Layout.of(*specs)
        source, target = (layout.views(memoryview(private_slot(layout.size_bytes))) for _ in range(2))
        for view in source:
            view[:] = bytes(range(256)) * (len(view) // 256) + bytes(len(view) % 256)
        return cls(layout=layout, buffers=list(source), targets=list(target))


class Way(Protocol):
    """A way to move messages."""

    by_reference: bool
    """Whether no byte of them is copied."""

    def prepare(self, message: Message, times: int) -> None:
        """Prepare the other end for that many moves of the message; not measured."""

    def move(self, message: Message) -> None:
        """Move it; return when the other end has acknowledged all of it."""


class Memcpy:
    """The C library's copy within this process."""

    by_reference = False

    def prepare(self, message: Message, times: int) -> None:
        pass

    def move(self, message: Message) -> None:
        for target, source in zip(message.targets, message.buffers, strict=True):
            ctypes.memmove(address(target), address(source), len(source))


class ByLink:
    """A link, whose returned credit is the acknowledgement.

    Args:
        in_place: The bytes are in the slot already.
    """

    def __init__(self, link: Link, *, in_place: bool) -> None:
        self.by_reference = in_place
        self._link = link
        self._in_place = in_place

    def prepare(self, message: Message, times: int) -> None:
        self._link.prepare(message.layout, Deadline.after(_PATIENCE_S))

    def move(self, message: Message) -> None:
        deadline = Deadline.after(_PATIENCE_S)
        if self._in_place:
            self._link.start_message(message.layout, deadline).finish()
        else:
            self._link.send(message.layout, message.buffers, deadline)
        self._link.drain(deadline)


class ByGloo:
    """A pair of torch.distributed's Gloo over loopback: all receives posted, all sends begun at once."""

    by_reference = False

    def __init__(self, peer: subprocess.Popen[str]) -> None:
        import torch

        self._peer = peer
        self._ack = torch.zeros(1, dtype=torch.uint8)

    def prepare(self, message: Message, times: int) -> None:
        assert self._peer.stdin
        self._peer.stdin.write(json.dumps([[len(buffer) for buffer in message.buffers], times]) + "\n")
        self._peer.stdin.flush()

    def move(self, message: Message) -> None:
        import torch
        import torch.distributed as dist

        tensors = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in message.buffers]
        for work in [dist.isend(tensor, 1) for tensor in tensors]:
            assert work is not None
            work.wait()
        dist.recv(self._ack, 1)


class ByGrpc:
    """grpc.aio with plain bytes: a stream of 2 MiB chunks, or one message."""

    by_reference = False

    def __init__(self, runner: asyncio.Runner, port: int, *, streamed: bool) -> None:
        self._runner = runner
        self._streamed = streamed
        runner.run(self._open(port))

    def prepare(self, message: Message, times: int) -> None:
        pass

    def move(self, message: Message) -> None:
        ack = self._runner.run(self._stream(message) if self._streamed else self._unary(message))
        assert ack == ACK

    def close(self) -> None:
        """End the connection."""
        self._runner.run(self._channel.close())

    async def _open(self, port: int) -> None:
        import grpc

        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=GRPC_OPTIONS)
        self._stream_call: Any = self._channel.stream_unary(f"/{SERVICE}/Stream")
        self._unary_call: Any = self._channel.unary_unary(f"/{SERVICE}/Unary")

    async def _stream(self, message: Message) -> bytes:
        async def chunks() -> AsyncIterator[bytes]:
            for buffer in message.buffers:
                for start in range(0, len(buffer), CHUNK_BYTES):
                    yield bytes(buffer[start : start + CHUNK_BYTES])

        return bytes(await self._stream_call(chunks()))

    async def _unary(self, message: Message) -> bytes:
        return bytes(await self._unary_call(b"".join(message.buffers)))


def open_gloo(rank: int, port: int) -> None:
    """Join the pair; the other rank does the same."""
    import torch.distributed as dist

    timeout = dt.timedelta(minutes=10)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=timeout, rank=rank, world_size=2)


@contextmanager
def all_ways() -> Iterator[dict[str, Way]]:
    """Give every way by name, with its other end running."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bottega-bench-")))
        doors = Endpoints(tcp=("127.0.0.1", 0), unix_path=folder / "links.sock")
        listener = stack.enter_context(LinkListener(doors, limits=LIMITS))
        memfd = stack.enter_context(_linked(listener, Backend.MEMFD))
        sealed = stack.enter_context(_linked(listener, Backend.TCP))
        plain_doors = Endpoints(tcp=("127.0.0.1", 0), seal=False)
        plain_listener = stack.enter_context(LinkListener(plain_doors, limits=LIMITS))
        plain = stack.enter_context(_linked(plain_listener, Backend.TCP))
        gloo = stack.enter_context(_gloo_peer())
        runner = stack.enter_context(asyncio.Runner())
        grpc_peer = stack.enter_context(_peer("grpc"))
        port = int(_answer(grpc_peer)["port"])
        streamed, unary = ByGrpc(runner, port, streamed=True), ByGrpc(runner, port, streamed=False)
        stack.callback(streamed.close)
        stack.callback(unary.close)
        yield {
            "memcpy": Memcpy(),
            "memfd, written in place": ByLink(memfd, in_place=True),
            "memfd, copied in": ByLink(memfd, in_place=False),
            "TCP, sealed": ByLink(sealed, in_place=False),
            "TCP, plain": ByLink(plain, in_place=False),
            "Gloo pair": ByGloo(gloo),
            "grpc.aio, streamed": streamed,
            "grpc.aio, unary": unary,
        }


@contextmanager
def _linked(listener: LinkListener, way: Backend) -> Iterator[Link]:
    with _peer(way.value) as peer:
        offer = listener.offer()
        assert peer.stdin
        peer.stdin.write(base64.b64encode(offer_to_wire(offer).SerializeToString()).decode() + "\n")
        peer.stdin.flush()
        with listener.accept(offer, Deadline.after(_PATIENCE_S)) as link:
            assert link.backend_choice.backend == way
            yield link


@contextmanager
def _gloo_peer() -> Iterator[subprocess.Popen[str]]:
    import socket

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with _peer("gloo") as peer:
        assert peer.stdin
        peer.stdin.write(f"{port}\n")
        peer.stdin.flush()
        open_gloo(0, port)
        _answer(peer)
        yield peer
        dist.destroy_process_group()


@contextmanager
def _peer(way: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", __spec__.name, way]
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        yield process
    finally:
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
        process.stdout.close()


def _answer(process: subprocess.Popen[str]) -> dict[str, int]:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"the other end of a way ended with {process.wait(5)}")
    values: dict[str, int] = json.loads(line)
    return values


def _say(**values: object) -> None:
    """Write a line for the other process."""
    print(json.dumps(values), flush=True)


def _serve_link(way: Backend) -> None:
    offer = offer_from_wire(LinkOffer.FromString(base64.b64decode(sys.stdin.readline())))
    with connect(offer, Deadline.after(30), limits=LIMITS, backends=(way,)) as link:
        try:
            while True:
                with link.recv(Deadline.after(_SERVE_S)) as incoming:
                    incoming.wait_all(Deadline.after(_SERVE_S))
                    for index in range(len(incoming.layout.specs)):
                        incoming.view(index)
        except LinkError:
            return  # the bench is over


def _serve_gloo() -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    open_gloo(1, int(sys.stdin.readline()))
    _say(ready=True)
    slots: dict[int, list[torch.Tensor]] = {}
    ack = torch.ones(1, dtype=torch.uint8)
    for line in sys.stdin:
        sizes, times = json.loads(line)
        tensors = slots.setdefault(sum(sizes), [torch.zeros(size, dtype=torch.uint8) for size in sizes])
        for _ in range(times):
            for work in [dist.irecv(tensor, 0) for tensor in tensors]:
                assert work is not None
                work.wait()
            dist.send(ack, 0)


async def _serve_grpc() -> None:
    import grpc

    slot = memoryview(private_slot(LIMITS.slot_bytes))

    async def stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        end = 0
        async for chunk in requests:
            copy(slot[end:], memoryview(chunk))
            end += len(chunk)
        return ACK

    async def unary(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        copy(slot, memoryview(request))
        return ACK

    server = grpc.aio.server(options=GRPC_OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Stream": grpc.stream_unary_rpc_method_handler(stream),
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _say(port=port)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


def main() -> None:
    """Serve the way of the argument until stdin or the link ends."""
    way = sys.argv[1]
    if way == "gloo":
        _serve_gloo()
    elif way == "grpc":
        asyncio.run(_serve_grpc())
    else:
        _serve_link(Backend(way))


if __name__ == "__main__":
    main()
