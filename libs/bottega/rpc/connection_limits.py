"""The connections to a server's port: how many there may be, and which are ended for the sake of others.

gRPC bounds all connections, not those of one host, which could have all and do nothing with them. So connections
that carry no call are ended where their host has more than its share. Two kinds are ended whatever they carry, since
gRPC does not end them: those of a host that calls again and again without being known, and those that bring far more
than their calls, such as pings. (gRPC ends one that pings too often, but not before its last answer has gone out, and
while pings come there is always another answer.) Such a host is kept out for some time, unless somebody who is known
has called from there, too: each new connection would bring new calls, and gRPC hands out those of all hosts in one
line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

import psutil

from bottega.background_tasks import running
from bottega.fair_order import fair_room
from bottega.process import open_files
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.peers import endpoint, host_of_address
from bottega.rpc.source_filter import SourceFilter

# Of the descriptors: a service may listen on two ports, and the rest is for files, links and child processes.
_PART_OF_OPEN_FILES = 3
# Between two looks. What comes in meanwhile has to fit between our bound and gRPC's.
_LOOK_S = 0.25
# The same while a host floods: it has made some hundred calls more by then.
_FLOOD_LOOK_S = 0.05
# For which a host is kept out.
_BANNED_S = 10.0
# gRPC's bound in times ours: one host's excess is ended before others find no room.
_GRPC_SHARE = 1.25
# Connections of strangers that are left where their host cannot be kept out: new ones would bring more calls.
_STRANGE_CONNECTIONS = 2
# Of a core, in which connections are looked at one by one for what they bring beside calls.
_BUSY_SHARE = 0.25
# What a connection may bring beside its calls: at once, and in a second. An honest client pings every half minute.
_IDLE_TALK_BYTES = 512 << 10
_IDLE_TALK_PER_S = 4 << 10
# Of what was sent, what a client may say about it: that it has room for more, and pings that measure the way. Go's
# sends a ping of 17 bytes with each frame of data, which has at least as many, and as many are answered.
_SAID_OF_SENT = 0.5
# The same while a message is coming, which is known when it is here.
_COMING_BYTES = 32 << 20
# Place in Linux's struct tcp_info of the bytes that the other end has taken, and of those that came from it.
_TAKEN_AT, _TCP_INFO_BYTES = 120, 136
# Between two lines in the log about the same thing.
_LOG_S = 10.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InboundConnection:
    """One that is open. descriptor: in this process. peer: as Peer.connection."""

    descriptor: int
    peer: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Bounds on the connections to a port."""

    guarded: int
    """By which each host has its share."""
    accepted: int
    """Beyond which gRPC closes new ones at once, whoever they are of."""


def connection_bounds(wanted: int) -> ConnectionBounds:
    """Return bounds for as many as are wanted, or as the limit of open files leaves room for."""
    accepted = max(1, min(math.ceil(wanted * _GRPC_SHARE), open_files.limit() // _PART_OF_OPEN_FILES))
    return ConnectionBounds(guarded=max(1, int(accepted / _GRPC_SHARE)), accepted=accepted)


class ConnectionGuard:
    """Ends connections to a port where they are in the way of others.

    Args:
        most: Of which each host has its share.
        share: See `fair_order.fair_room`; of one host.
        busy: Returns the other ends (peers.endpoint) of connections that carry calls now. They may stay however many
            connections their host has.
        ledger: What the calls of each connection account for.
    """

    def __init__(
        self, *, most: int, share: float, busy: Callable[[], Collection[str]], ledger: ConnectionLedger
    ) -> None:
        self._most = most
        self._share = share
        self._busy = busy
        self._ledger = ledger
        self._banned: SourceFilter | None = None
        self._traffic: dict[InboundConnection, _Traffic] = {}
        self._processor_s, self._looked_at = time.process_time(), time.monotonic()
        self._ended = Counter[str]()
        self._logged_at = -_LOG_S

    @contextlib.asynccontextmanager
    async def looking(self, port: int) -> AsyncIterator[None]:
        """Look, again and again, in the block."""
        async with running(self._look_on(port)):
            yield

    async def _look_on(self, port: int) -> None:
        self._banned = SourceFilter(port, banned_s=_BANNED_S)
        while True:
            await asyncio.sleep(_FLOOD_LOOK_S)
            await self._ledger.wait_for_flood(_LOOK_S - _FLOOD_LOOK_S)
            try:
                await asyncio.to_thread(self._look, port, frozenset(self._busy()), self._ledger.floods())
            except (OSError, psutil.Error) as error:
                _log.warning("connections cannot be looked at", extra={"why": str(error)})

    def _look(self, port: int, busy: Collection[str], floods: Collection[str]) -> None:
        if self._banned is not None:
            self._banned.lift()
        # With fewer files and sockets open no host can have more than its share.
        crowded = psutil.Process().num_fds() > self._share * self._most
        working = self._is_working()
        if not (crowded or floods or working):
            return
        found = connections(port)
        if crowded:
            self._end(
                "connections without calls were ended: a host had more than its share", self._too_many(found, busy)
            )
        # A host that may have all is a proxy: its connections carry the calls of tenants as well.
        for host in floods if self._share < 1 else ():
            left = 0 if self._keep_out(host) else _STRANGE_CONNECTIONS
            strange = [each for each in found if each.host == host and not self._ledger.found(each.peer).known]
            self._end("connections were ended: a host called again and again without being known", strange[left:])
        talkers = list(self._idle_talkers(found)) if working else []
        for host in {each.host for each in talkers} - set(floods) if self._share < 1 else ():
            self._keep_out(host)
        self._end("connections were ended: they brought far more than their calls", talkers)
        self._log()

    def _keep_out(self, host: str) -> bool:
        """Keep a host out from which nobody has called of late who is known. Return whether that was done."""
        return self._banned is not None and not self._ledger.knows(host) and self._banned.ban(host)

    def _end(self, event: str, ended: Iterable[InboundConnection]) -> None:
        for connection in ended:
            if end(connection):
                self._ended[event] += 1
                if self._banned is not None and self._banned.has(connection.host):
                    # No other connection has its name as long as the host is kept out.
                    self._ledger.found(connection.peer).ended_at = time.monotonic()

    def _log(self) -> None:
        if not self._ended.total() or time.monotonic() - self._logged_at < _LOG_S:
            return
        for event, count in self._ended.items():
            if count:
                _log.warning(event, extra={"ended": count, "max_connections": self._most})
        self._ended.clear()
        self._logged_at = time.monotonic()

    def _is_working(self) -> bool:
        """Whether the process has used much of a core since the last look, for whatever it was."""
        processor_s, now = time.process_time(), time.monotonic()
        used = processor_s - self._processor_s > _BUSY_SHARE * (now - self._looked_at)
        self._processor_s, self._looked_at = processor_s, now
        return used

    def _idle_talkers(self, found: Iterable[InboundConnection]) -> Iterator[InboundConnection]:
        """Yield connections over which far more came than their calls can have brought."""
        earlier, self._traffic = self._traffic, {}
        for connection in found:
            account, idle_bytes = self._ledger.found(connection.peer), _idle_bytes(connection)
            before = earlier.get(connection) or _Traffic(at=time.monotonic())
            now = before.with_more(idle_bytes, account.explained_bytes)
            self._traffic[connection] = now
            most = _COMING_BYTES if account.reading else _IDLE_TALK_BYTES
            if now.unexplained_bytes > most:
                yield connection

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """A leaking bucket of the bytes of a connection that its calls do not account for."""

    at: float
    idle_bytes: float = 0.0
    """What came, less what may be said of what was sent."""
    explained_bytes: int = 0
    unexplained_bytes: float = 0.0

    def with_more(self, idle_bytes: float, explained_bytes: int) -> _Traffic:
        """Return what it is now. What is explained before it has all come is worth nothing for what comes later."""
        now = time.monotonic()
        more = (idle_bytes - self.idle_bytes) - max(0, explained_bytes - self.explained_bytes)
        left = self.unexplained_bytes + more - _IDLE_TALK_PER_S * (now - self.at)
        return _Traffic(
            at=now,
            idle_bytes=idle_bytes,
            explained_bytes=explained_bytes,
            unexplained_bytes=max(0.0, left),
        )


def _idle_bytes(connection: InboundConnection) -> float:
    """Return `_Traffic.idle_bytes` of a connection so far; 0 where the system does not tell."""
    with _own(connection) as ours:
        if ours is None:
            return 0.0
        info = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return 0.0
    taken, received = struct.unpack_from("=QQ", info, _TAKEN_AT)
    return float(received - _SAID_OF_SENT * taken)


def connections(port: int) -> list[InboundConnection]:
    """Those that others have opened to a port of this process. Blocks for some milliseconds."""
    return [
        InboundConnection(descriptor=each.fd, peer=endpoint(*each.raddr), host=host_of_address(each.raddr.ip))
        for each in psutil.Process().net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.laddr.port == port and each.fd >= 0
    ]


def end(connection: InboundConnection) -> bool:
    """End a connection, as if its other end had gone: the owner of the descriptor notices, and closes it.

    False when that descriptor is another one's by now.
    """
    with _own(connection) as ours:
        if ours is None:
            return False
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
            return True
    return False


@contextlib.contextmanager
def _own(connection: InboundConnection) -> Iterator[socket.socket | None]:
    """A descriptor of our own for a connection in the block; None when its descriptor is another one's by now."""
    with contextlib.ExitStack() as stack:
        ours = None
        with contextlib.suppress(OSError, IndexError):
            own = os.dup(connection.descriptor)
            try:
                ours = stack.enter_context(socket.socket(fileno=own))
            except OSError:
                os.close(own)
                raise
            found = ours.getpeername()
            if endpoint(str(found[0]), found[1]) != connection.peer:
                ours = None
        yield ours
