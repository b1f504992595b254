"""Who sits between two hosts: takes the connections of one, opens its own to the other, and changes what passes.

`python -m tests.support.record_relay` runs in the namespace between them (network_namespaces.py). It knows how links
open and what a sealed record looks like, as anybody may, and no token. All that it saw can be searched.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from typing import TypeVar

from bottega.transport.handshake.messages import (
    CHALLENGE_BYTES,
    PROOF_BYTES,
    REQUEST_BYTES,
    WELCOME_BYTES,
    Direction,
    parse_request,
)
from tests.support.linked_host import MESSAGES
from tests.support.network_namespaces import COMMAND_S, FAR, configure, serve

KINDS = ("flip", "replay", "truncate", "reorder", "drop")

_LENGTH_BYTES = 4
# Where a request says whether what follows is sealed.
_SEALED_AT = 6
# What a connection carries before its first record, behind the request.
_HANDSHAKE = {True: (PROOF_BYTES,), False: (CHALLENGE_BYTES, WELCOME_BYTES)}
_RESET = struct.pack("ii", 1, 0)
# For connections to end when both hosts are done with them.
_QUIET_S = 20.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flow:
    """One way of one of a link's two connections."""

    direction: Direction
    to_listener: bool

    @property
    def has_tensors(self) -> bool:
        """Whether it carries those, or else the credit for them."""
        return (self.direction == Direction.CONNECTOR_SENDS) == self.to_listener

    @property
    def records(self) -> int:
        """As many as there are at least: a layout and its messages, or the credit for these."""
        return MESSAGES + 1 if self.has_tensors else MESSAGES


FLOWS = tuple(Flow(direction, to_listener) for direction in Direction for to_listener in (True, False))


@dataclass(slots=True, kw_only=True)
class Tampering:
    """What is done to one link. index: of the record in its flow. whole: records of it that arrive in their order, as
    they were. in_whole_records: whether what arrives then looks like records, so that only their seals can tell; else
    the stream may just end within one. done: whether it has happened.
    """

    flow: Flow
    index: int
    whole: int = 0
    in_whole_records: bool = True
    done: bool = False


class _Way:
    """One way of a connection. seen: all that came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.seen = bytearray()

    async def read(self, count: int) -> bytes:
        """So many bytes, which go no further. Raises IncompleteReadError."""
        data = await self._reader.readexactly(count)
        self.seen += data
        return data

    async def record(self) -> bytes:
        length = await self.read(_LENGTH_BYTES)
        return length + await self.read(int.from_bytes(length, "little"))

    def write(self, data: bytes) -> None:
        """What arrives at the other end."""
        self._writer.write(data)

    async def pass_rest(self, *, on: bool = True) -> None:
        """Reads to the end. on: whether that goes on its way."""
        while piece := await self._reader.read(64 << 10):
            self.seen += piece
            if on:
                self._writer.write(piece)
                await self._writer.drain()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()


class Relay:
    """All connections to FAR, at the ports that it was told of.

    mode: one of KINDS, done to each link once; "sealed" or "unsealed", what requests then ask for; "" passes all.
    """

    def __init__(self) -> None:
        self.mode = ""
        self.links: dict[str, Tampering] = {}
        self._chance = random.Random(7)
        self._ways: list[_Way] = []
        # A record of another link, by its place there.
        self._earlier: dict[tuple[Flow, int], bytes] = {}
        self._carrying: set[asyncio.Task[None]] = set()
        self._servers: dict[int, asyncio.Server] = {}

    async def listen(self, port: int) -> None:
        """Takes what is meant for that port of FAR. It is bound as if it were FAR, which root may in a namespace.

        FAR may get a port again: then it is listened to already, or connections to it have just ended.
        """
        if port in self._servers:
            return
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_IP, socket.IP_TRANSPARENT, 1)
        listening.bind((FAR, port))
        self._servers[port] = await asyncio.start_server(self._accept, sock=listening, backlog=256)

    async def search(self, needles: list[bytes]) -> dict[str, object]:
        """How many bytes passed since the last search, and which of the needles were in them; once all is quiet."""
        if self._carrying:
            await asyncio.wait(self._carrying, timeout=_QUIET_S)
        assert not self._carrying, "connections that no host ends"
        seen, self._ways = [way.seen for way in self._ways], []
        found = [needle.hex() for needle in needles if any(needle in each for each in seen)]
        return {"size_bytes": sum(map(len, seen)), "found": found}

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        writers = [writer]
        try:
            port = writer.get_extra_info("sockname")[1]
            far_reader, far_writer = await asyncio.open_connection(FAR, port)
            writers.append(far_writer)
            for each in writers:  # with a reset at the end, which leaves no port taken for a minute
                each.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            await self._carry(_Way(reader, far_writer), _Way(far_reader, writer))
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the hosts has left
        finally:
            for each in writers:
                each.transport.abort()

    async def _carry(self, to_listener: _Way, to_connector: _Way) -> None:
        self._ways += [to_listener, to_connector]
        tampering, direction = None, Direction.CONNECTOR_SENDS
        if self.mode:
            encoded = bytearray(await to_listener.read(REQUEST_BYTES))
            request = parse_request(bytes(encoded))
            direction = request.direction
            if self.mode in KINDS:
                tampering = self.links.setdefault(request.link_id, self._new_tampering())
            else:
                encoded[_SEALED_AT] = self.mode == "sealed"
            to_listener.write(bytes(encoded))
        await asyncio.gather(
            self._pass_on(to_listener, Flow(direction, True), tampering),
            self._pass_on(to_connector, Flow(direction, False), tampering),
        )

    async def _pass_on(self, way: _Way, flow: Flow, tampering: Tampering | None) -> None:
        try:
            if tampering is not None and tampering.flow == flow:
                for count in _HANDSHAKE[flow.to_listener]:
                    way.write(await way.read(count))
                await self._tamper(tampering, way)
                way.end()
                await way.pass_rest(on=False)
            else:
                await way.pass_rest()
        except (OSError, asyncio.IncompleteReadError):
            pass  # one of the hosts has left
        finally:
            way.end()

    def _new_tampering(self) -> Tampering:
        flow = self._chance.choice(FLOWS)
        return Tampering(flow=flow, index=self._chance.randrange(flow.records - 1))

    async def _tamper(self, tampering: Tampering, way: _Way) -> None:
        for _ in range(tampering.index):
            way.write(await way.record())
        record, following = await way.record(), await way.record()
        tampering.whole = tampering.index
        way.write(self._tampered(tampering, record, following))
        self._earlier[tampering.flow, tampering.index] = record
        tampering.done = True

    def _tampered(self, tampering: Tampering, record: bytes, following: bytes) -> bytes:
        """What arrives in place of two records."""
        match self.mode:
            case "flip":
                at = self._chance.randrange(8 * len(record))
                tampering.in_whole_records = at >= 8 * _LENGTH_BYTES
                changed = bytearray(record)
                changed[at // 8] ^= 1 << at % 8
                return bytes(changed) + following
            case "replay":
                earlier = self._earlier.get((tampering.flow, tampering.index))
                if earlier is not None and self._chance.random() < 0.5:
                    return earlier + following
                tampering.whole += 1
                return record + record + following
            case "truncate":
                cut = self._chance.randrange(1, len(record))
                goes_on = following if self._chance.random() < 0.5 else b""
                tampering.in_whole_records = cut >= _LENGTH_BYTES and cut + len(goes_on) >= len(record)
                return record[:cut] + goes_on
            case "reorder":
                return following + record
            case _:
                assert self.mode == "drop"
                return following


def _main() -> None:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    relay = Relay()

    def run(work: Coroutine[None, None, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, loop).result(COMMAND_S)

    async def set_mode(mode: str) -> None:
        relay.mode = mode

    async def tampered() -> dict[str, object]:
        done, relay.links = relay.links, {}
        return {link_id: asdict(each) for link_id, each in done.items()}

    serve(
        {
            "configure": configure,
            "listen": lambda port: run(relay.listen(port)),
            "mode": lambda mode: run(set_mode(mode)),
            "tampered": lambda: run(tampered()),
            "search": lambda needles: run(relay.search([bytes.fromhex(each) for each in needles])),
        }
    )


if __name__ == "__main__":
    _main()
