"""The connections of clients to a port of this process, as the system reports them, and their traffic."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bottega.rpc import source_filter
from bottega.rpc.address import endpoint, host_of_address
from bottega.rpc.source_filter import open_sockets

# Bytes that a connection may bring besides its calls per second. An honest client pings every 30 s.
_IDLE_TALK_PER_S = 4 << 10
# Bytes of window updates and pings per byte that was sent to the client. Go's client sends a ping of 17 bytes for each
# data frame, which has at least as many, and our answer to it has 17 as well.
_TALK_PER_SENT_BYTE = 0.5
# Offset, in Linux's struct tcp_info, of the bytes acknowledged by the peer and of the bytes received.
_ACKNOWLEDGED_AT, _TCP_INFO_BYTES = 120, 136
# From <asm-generic/socket.h>, which Python's socket module does not have, and the place of the count of dropped packets
# in what it returns (<linux/sock_diag.h>).
_MEMORY_INFO, _DROPS_AT, _MEMORY_INFO_BYTES = 55, 32, 36
_OPEN_FILES = Path("/proc/self/fd")
# Connections that are looked at in one go. It takes 2 ms, and during a flood the event loop waits for it.
_PIECE = 256

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True, kw_only=True)
class InboundConnection:
    """An open connection of a client."""

    descriptor: int
    """File descriptor of its socket in this process."""
    peer: str
    """The client's end, as in Peer.connection."""
    host: str
    acknowledged_bytes: int = field(default=0, compare=False)
    """Bytes sent to the client that it had acknowledged; 0 if the system does not report it."""
    received_bytes: int = field(default=0, compare=False)
    """Bytes received from the client."""
    dropped_packets: int = field(default=0, compare=False)
    """Packets of the client that a filter has dropped, or the system for another reason; 1 if it does not report it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A leaky bucket of the received bytes that a connection's calls do not explain."""

    at: float
    idle_bytes: float = 0.0
    """Bytes received, less the control frames that the bytes sent may have caused."""
    explained_bytes: int = 0
    unexplained_bytes: float = 0.0

    def with_more(self, connection: InboundConnection, explained_bytes: int) -> Traffic:
        """Return the bucket after more bytes. Bytes explained earlier do not excuse bytes that arrive later."""
        now = time.monotonic()
        idle_bytes = connection.received_bytes - _TALK_PER_SENT_BYTE * connection.acknowledged_bytes
        more = (idle_bytes - self.idle_bytes) - max(0, explained_bytes - self.explained_bytes)
        left = self.unexplained_bytes + more - _IDLE_TALK_PER_S * (now - self.at)
        return Traffic(
            at=now,
            idle_bytes=idle_bytes,
            explained_bytes=explained_bytes,
            unexplained_bytes=max(0.0, left),
        )


def open_file_count() -> int:
    """Return the number of files and sockets that this process has open."""
    return _OPEN_FILES.stat().st_size or sum(1 for _ in _OPEN_FILES.iterdir())  # before Linux 6.2 the size is 0


def connections(port: int) -> Iterator[InboundConnection]:
    """Yield the connections of clients to a port of this process."""
    for opened in open_sockets(port):
        with contextlib.suppress(OSError):  # a socket that listens, or whose peer is gone
            address, peer_port, *_ = opened.getpeername()
            acknowledged_bytes, received_bytes = _acknowledged_and_received(opened)
            yield InboundConnection(
                descriptor=opened.fileno(),
                peer=endpoint(address, peer_port),
                host=host_of_address(address),
                acknowledged_bytes=acknowledged_bytes,
                received_bytes=received_bytes,
                dropped_packets=_dropped_packets(opened),
            )


def in_pieces(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    """Yield the items in lists that are short enough to be looked at in one go."""
    rest = iter(items)
    while piece := list(itertools.islice(rest, _PIECE)):
        yield piece


def end(connection: InboundConnection) -> bool:
    """Shut a connection down as if its client had closed it. gRPC, which owns the descriptor, then closes it.

    Return False if the descriptor belongs to another connection by now.
    """
    with _duplicate(connection) as duplicate:
        if duplicate is None:
            return False
        with contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)
            # Else the system would wait for the client to acknowledge the end, which is dropped.
            source_filter.let_through(duplicate)
            return True
    return False


def mute(connection: InboundConnection) -> bool:
    """Drop everything that the client sends from now on. Return False if the system cannot do that."""
    with _duplicate(connection) as duplicate:
        return duplicate is not None and source_filter.mute(duplicate)


def let_through(connection: InboundConnection) -> None:
    """Drop nothing that the client sends from now on."""
    with _duplicate(connection) as duplicate:
        if duplicate is not None:
            source_filter.let_through(duplicate)


def _acknowledged_and_received(opened: socket.socket) -> tuple[int, int]:
    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return 0, 0
    acknowledged, received = struct.unpack_from("=QQ", info, _ACKNOWLEDGED_AT)
    return acknowledged, received


def _dropped_packets(opened: socket.socket) -> int:
    try:
        info = opened.getsockopt(socket.SOL_SOCKET, _MEMORY_INFO, _MEMORY_INFO_BYTES)
    except OSError:  # before Linux 4.12
        return 1
    (dropped,) = struct.unpack_from("=I", info, _DROPS_AT)
    return int(dropped)


@contextlib.contextmanager
def _duplicate(connection: InboundConnection) -> Iterator[socket.socket | None]:
    """Yield a duplicate of a connection's socket, or None if its descriptor belongs to another connection by now."""
    with contextlib.ExitStack() as stack:
        duplicate = None
        with contextlib.suppress(OSError, IndexError):
            descriptor = os.dup(connection.descriptor)
            try:
                duplicate = stack.enter_context(socket.socket(fileno=descriptor))
            except OSError:
                os.close(descriptor)
                raise
            found = duplicate.getpeername()
            if endpoint(str(found[0]), found[1]) != connection.peer:
                duplicate = None
        yield duplicate
