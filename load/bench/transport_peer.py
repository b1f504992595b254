"""The receiving process of the transport bench: takes messages by one way and acknowledges each.

`python -m load.bench.transport_peer WAY` speaks lines of JSON on stdin and stdout. It measures nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator

from bottega.errors import LinkError
from bottega.transport import Backend, Deadline, Limits, connect, offer_from_wire
from bottega.transport.memory import copy, private_slot
from bottega.v1.link_pb2 import LinkOffer

LIMITS = Limits(slots=2, slot_bytes=128 << 20)
SERVICE = "bench.Transport"
GRPC_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
ACK = b"\1"
_PATIENCE_S = 600.0


def main() -> None:
    """Serves the way of the argument until stdin ends or the link does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["memfd", "tcp", "gloo", "grpc"])
    way = parser.parse_args().way
    if way == "gloo":
        _serve_gloo()
    elif way == "grpc":
        asyncio.run(_serve_grpc())
    else:
        _serve_link(Backend(way))


def say(**values: object) -> None:
    """A line for the other process."""
    print(json.dumps(values), flush=True)


def _serve_link(way: Backend) -> None:
    offer = offer_from_wire(LinkOffer.FromString(base64.b64decode(sys.stdin.readline())))
    with connect(offer, Deadline.after(30), limits=LIMITS, backends=(way,)) as link:
        try:
            while True:
                with link.recv(Deadline.after(_PATIENCE_S)) as incoming:
                    incoming.wait_all(Deadline.after(_PATIENCE_S))
                    for index in range(len(incoming.layout.specs)):
                        incoming.view(index)
        except LinkError:
            return  # the bench is over


def _serve_gloo() -> None:
    import torch
    import torch.distributed as dist

    from load.bench.transport_ways import open_gloo

    torch.set_num_threads(1)
    open_gloo(1, int(sys.stdin.readline()))
    say(ready=True)
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
    say(port=port)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    main()
