"""A DNS server on a loopback port, which gRPC's own resolver asks about one name."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import struct
from collections.abc import AsyncIterator, Sequence

_ANSWER_TO_A_QUERY, _INTERNET, _A = 0x8180, 1, 1


class NameServer(asyncio.DatagramProtocol):
    """Answers each question for addresses of IPv4 with `addresses`, and every other question with none."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = list(addresses)
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5  # the header, the name, and its type and class
        asks_for_ipv4 = struct.unpack_from(">H", data, end - 4)[0] == _A
        records = [
            struct.pack(">HHHIH", 0xC00C, _A, _INTERNET, 1, 4) + ipaddress.ip_address(address).packed
            for address in (self.addresses if asks_for_ipv4 else ())
        ]
        header = data[:2] + struct.pack(">HHHHH", _ANSWER_TO_A_QUERY, 1, len(records), 0, 0)
        assert self._transport is not None
        self._transport.sendto(header + data[12:end] + b"".join(records), addr)


@contextlib.asynccontextmanager
async def name_server(*addresses: str) -> AsyncIterator[tuple[NameServer, str]]:
    """Yield a server, and what stands before a name in an address that it resolves: dns://HOST:PORT/"""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: NameServer(addresses), local_addr=("127.0.0.1", 0))
    host, port = transport.get_extra_info("sockname")
    try:
        yield server, f"dns://{host}:{port}/"
    finally:
        transport.close()
