"""The connections to a server's port: how many there may be, and whose go first where one host has too many.

gRPC bounds all connections, not those of one host, which could have all and do nothing with them. So connections
that carry no call are ended where their host has more than its share.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass

import psutil

from bottega.background_tasks import running
from bottega.process import open_files
from bottega.rpc.interceptor.call_limits import fair_room
from bottega.rpc.peers import endpoint, host_of_address

# Of the descriptors: a service may listen on two ports, and the rest is for files, links and child processes.
_PART_OF_OPEN_FILES = 3
# In which a newcomer that finds no room is let in at its second or third try: clients try again within a second.
_LOOK_S = 1.0
# Between two lines in the log about the same thing.
_LOG_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InboundConnection:
    """One that is open. descriptor: in this process. peer: as Peer.connection."""

    descriptor: int
    peer: str
    host: str


def most_connections(wanted: int) -> int:
    """As many as are wanted, or as the limit of open files leaves room for."""
    return max(1, min(wanted, open_files.limit() // _PART_OF_OPEN_FILES))


class ConnectionGuard:
    """Looks after the connections to a port. most: that gRPC takes. share: see call_limits.fair_room, of one host.

    busy: the other ends (peers.endpoint) of connections that carry calls now; those are left alone.
    """

    def __init__(self, *, most: int, share: float, busy: Callable[[], Collection[str]]) -> None:
        self._most = most
        self._share = share
        self._busy = busy
        self._ended = 0
        self._logged_at = -_LOG_S

    @contextlib.asynccontextmanager
    async def looking(self, port: int) -> AsyncIterator[None]:
        """Looks, again and again, in the block."""
        async with running(self._look_on(port)):
            yield

    async def _look_on(self, port: int) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await asyncio.to_thread(self._look, port, frozenset(self._busy()))
            except (OSError, psutil.Error) as error:
                _log.warning("connections cannot be looked at", extra={"why": str(error)})

    def _look(self, port: int, busy: Collection[str]) -> None:
        # With fewer files and sockets open no host can have more than its share.
        if psutil.Process().num_fds() <= self._share * self._most:
            return
        for connection in self._too_many(connections(port), busy):
            self._ended += end(connection)
        if self._ended and time.monotonic() - self._logged_at >= _LOG_S:
            facts = {"ended": self._ended, "max_connections": self._most}
            _log.warning("connections without calls were ended: a host had more than its share", extra=facts)
            self._ended, self._logged_at = 0, time.monotonic()

    def _too_many(self, found: Collection[InboundConnection], busy: Collection[str]) -> Iterable[InboundConnection]:
        """Those to end. Which of a host's is left to chance: nothing tells which came first, or which is harmless."""
        by_host: dict[str, list[InboundConnection]] = defaultdict(list)
        for connection in found:
            by_host[connection.host].append(connection)
        free = self._most - len(found)
        for held in sorted(by_host.values(), key=len, reverse=True):
            idle = [connection for connection in held if connection.peer not in busy]
            random.shuffle(idle)
            left = len(held)
            while idle and fair_room(free=free, held=left, share=self._share) < 0:
                yield idle.pop()
                left, free = left - 1, free + 1


def connections(port: int) -> list[InboundConnection]:
    """Those that others have opened to a port of this process. Blocks for some milliseconds."""
    return [
        InboundConnection(descriptor=each.fd, peer=endpoint(*each.raddr), host=host_of_address(each.raddr.ip))
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port and each.fd >= 0
    ]


def end(connection: InboundConnection) -> bool:
    """Ends a connection, as if its other end had gone: the owner of the descriptor notices, and closes it.

    False when that descriptor is another one's by now.
    """
    try:
        own = os.dup(connection.descriptor)
    except OSError:
        return False
    try:
        ours = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        return False
    with ours:
        try:
            found = ours.getpeername()
            if endpoint(str(found[0]), found[1]) != connection.peer:
                return False
            ours.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            return False
    return True
