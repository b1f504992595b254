"""Limits on the connections to a server's port, and the guard that ends connections which harm other clients.

gRPC limits the total number of connections, but not those of one host, which could take all of them and do nothing. So
the guard ends connections without calls if their host has more than its share.

It ends two kinds of connections even if they have calls, because gRPC does not end them: those of a host that floods
the server with calls without being known, and those that bring far more data than their calls, such as pings. (gRPC
ends a connection that pings too often only after its last answer was sent, and each ping causes another answer.) Such a
host is banned for some time, because each new connection would bring new calls, and gRPC queues those of all hosts
together.

A host may be a NAT with tenants behind it. If a known caller used it within the last day, it is not banned. If tenants
behind it are not known yet, or not known any more, they can connect between two bans (see SourceFilter), and then the
host is known. While a host is not banned, the guard mutes its connections with refused calls and, among those whose
first call still waits, the ones with most data: what they send is dropped for some time, and then they are ended. If
they were ended at once, they would come again with new calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import random
import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from bottega.background_tasks import running
from bottega.clocks import seconds_until_tick
from bottega.fair_order import fair_room
from bottega.process import open_files
from bottega.rpc.address import endpoint, host_of_address
from bottega.rpc.interceptor.connection_ledger import ConnectionAccount, ConnectionLedger
from bottega.rpc.source_filter import SourceFilter, mute, open_sockets, unmute

# Part of the file descriptors for the connections of one port. A service may listen on two ports; the rest is for
# files, links and child processes.
_PART_OF_OPEN_FILES = 3
# Seconds between two checks. Connections that open meanwhile must fit between the guard's limit and gRPC's.
_ROUND_S = 0.25
# The same while the process is at rest, with less than half of the open files that a crowded port has.
_REST_ROUND_S = 1.0
_REST_SHARE = 0.5
# The same during a flood: its host makes some hundred calls in this time.
_FLOOD_ROUND_S = 0.05
# A flooding host is kept out for so long, and then not again for half of it: a client's connection attempt, which is
# repeated after 1, 3 and 7 s, mostly succeeds meanwhile.
_BANNED_S, _PROBATION_S = 10.0, 5.0
# gRPC's limit relative to the guard's, so that one host's excess is ended before others find no room.
_GRPC_SHARE = 1.25
# If a flooding host is not kept out, so many of its connections with at most so many refused calls each are served on.
# The others are muted for so long, and then ended.
_STRANGE_CONNECTIONS, _STRANGE_CALLS = 2, 100
_MUTED_S = 10.0
# The same for its connections whose first call still waits, and for those among them that brought no more bytes
# than a client needs for its first calls. Both kinds can bring some 3,000 calls: gRPC reads up to 640 of a connection,
# and a short one takes 35 bytes.
_WAITING_CONNECTIONS = 4
_NEW_CONNECTIONS, _NEW_BYTES, _NEW_MUTED_S = 32, 4 << 10, 2.0
# Share of a core from which on the traffic of each connection is checked.
_BUSY_SHARE = 0.25
# Bytes that a connection may bring besides its calls: at once, and per second. An honest client pings every 30 s.
_IDLE_TALK_BYTES = 512 << 10
_IDLE_TALK_PER_S = 4 << 10
# Bytes of window updates and pings per byte that was sent to the client. Go's client sends a ping of 17 bytes for each
# data frame, which has at least as many, and our answer to it has 17 as well.
_TALK_PER_SENT_BYTE = 0.5
# The same while a message is arriving, which is counted only when it is complete.
_ARRIVING_BYTES = 32 << 20
# Connections that are looked at in one go. It takes 2 ms, and during a flood the event loop waits for it.
_PIECE = 256
# Offset, in Linux's struct tcp_info, of the bytes acknowledged by the peer and of the bytes received.
_ACKNOWLEDGED_AT, _TCP_INFO_BYTES = 120, 136
# Seconds between two log lines about the same event.
_LOG_S = 10.0
_OPEN_FILES = Path("/proc/self/fd")
_FLOOD = "connections were ended or muted, because a host made many calls without being known"

_log = logging.getLogger(__name__)

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


_Stranger = tuple[InboundConnection, ConnectionAccount]
"""A connection that no known caller has used, with its account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionBounds:
    """Upper bounds on the connections to a port."""

    guarded: int
    """Bound that the guard enforces. Each host may have its share of it."""
    accepted: int
    """Bound above which gRPC closes new connections at once, whatever their host."""


def connection_bounds(wanted: int) -> ConnectionBounds:
    """Return bounds for the wanted number of connections, or fewer if the limit on open files is too low."""
    accepted = max(1, min(math.ceil(wanted * _GRPC_SHARE), open_files.limit() // _PART_OF_OPEN_FILES))
    return ConnectionBounds(guarded=max(1, int(accepted / _GRPC_SHARE)), accepted=accepted)


class ConnectionGuard:
    """Ends connections to a port if they take the place or the time of other clients.

    Args:
        max_connections: Upper bound on all connections. Each host may have its share of it.
        share: A host's share; see `fair_order.fair_room`. With 1 a host may be a proxy with tenants behind it, and no
            connection is ended because of other calls of its host.
        busy: Returns the client ends (peers.endpoint) of connections that have calls now. A host may keep all of these.
        ledger: The accounts of the connections' calls.
    """

    def __init__(
        self, *, max_connections: int, share: float, busy: Callable[[], Collection[str]], ledger: ConnectionLedger
    ) -> None:
        self._max_connections = max_connections
        self._share = share
        self._busy = busy
        self._ledger = ledger
        self._banned: SourceFilter | None = None
        self._muted_until: dict[InboundConnection, float] = {}
        self._traffic: dict[InboundConnection, _Traffic] = {}
        self._processor_s, self._checked_at = time.process_time(), time.monotonic()
        self._ended = Counter[str]()
        self._logged_at = -_LOG_S

    @contextlib.asynccontextmanager
    async def looking(self, port: int) -> AsyncIterator[None]:
        """Guard a port while the block runs."""
        async with running(self._guard(port)):
            yield

    async def _guard(self, port: int) -> None:
        banned = self._banned = SourceFilter(port, banned_s=_BANNED_S, probation_s=_PROBATION_S)
        pause_s = _ROUND_S
        while True:
            await self._ledger.wait_for_flood(pause_s)
            pause_s = _ROUND_S
            try:
                if banned.is_due():
                    banned.lift()
                    self._ledger.set_banned(banned.hosts())
                floods, crowding, working = self._ledger.floods(), self._crowding(), self._is_working()
                # The connections of a host that was admitted again are looked at before its calls are.
                # One that a tenant has used since then needs no more than the defence against floods.
                admitted = frozenset(host for host in banned.on_probation() if not self._ledger.knows(host))
                crowded = crowding > 1.0
                if crowded or floods or admitted or working or self._over():
                    look = _Look(port=port, crowded=crowded, working=working, floods=floods, admitted=admitted)
                    began_s = time.monotonic()
                    await self._look(look)
                    took_s = time.monotonic() - began_s
                    await asyncio.sleep(_FLOOD_ROUND_S if floods else max(_FLOOD_ROUND_S, 3 * took_s))
                if admitted:
                    pause_s = 0.0
                elif crowding < _REST_SHARE and not (floods or working):
                    pause_s = seconds_until_tick(_REST_ROUND_S)
            except OSError as error:
                _log.warning("the server's connections cannot be inspected", extra={"why": str(error)})

    def _crowding(self) -> float:
        """Return the open files and sockets, relative to a host's share. Up to 1, no host exceeds it."""
        return open_file_count() / (self._share * self._max_connections)

    def _is_working(self) -> bool:
        """Return whether the process has used much of a core since the last round."""
        processor_s, now = time.process_time(), time.monotonic()
        used = processor_s - self._processor_s > _BUSY_SHARE * (now - self._checked_at)
        self._processor_s, self._checked_at = processor_s, now
        return used

    async def _look(self, look: _Look) -> None:
        """Look at all connections, and end or mute some."""
        # It takes 50 ms for 4,000 connections, so a thread does it. During a flood a thread would wait for the event
        # loop at each system call.
        pieces = self._look_in_pieces(look, frozenset(self._busy()))
        if not look.repelled:
            await asyncio.to_thread(_finish, pieces)
            return
        for _ in pieces:
            await asyncio.sleep(0)

    def _look_in_pieces(self, look: _Look, busy: Collection[str]) -> Iterator[None]:
        """Look at all connections, and yield after each piece of the work."""
        yield from self._end_muted()
        if not (look.crowded or look.repelled or look.working):
            return
        found: list[InboundConnection] = []
        for piece in _pieces(connections(look.port)):
            found += piece
            yield
        if look.crowded:
            yield from self._end(
                "connections without calls were ended, because their host had more than its share",
                self._too_many(found, busy),
            )
        # A host that may have all connections is a proxy: its connections also carry calls of tenants.
        for host in look.repelled if self._share < 1 else ():
            kept_out = host in look.floods and self._keep_out(host)
            of_host = [connection for connection in found if connection.host == host]
            yield from self._repel(of_host, kept_out=kept_out)
        if look.working:
            yield from self._end_talkers(look, found)
        self._log()

    def _repel(self, connections: Iterable[InboundConnection], *, kept_out: bool) -> Iterator[None]:
        """End the connections of a banned host, or mute some of those of a flooding host that cannot be banned.

        It yields after each piece of the work.

        Args:
            connections: All connections of the host. Those of known callers are not affected.
        """
        strange: list[_Stranger] = []
        for piece in _pieces(connections):
            accounts = ((connection, self._ledger.found(connection.peer)) for connection in piece)
            strange += [(connection, account) for connection, account in accounts if not account.known]
            yield
        # Calls are authenticated between pieces, so whether a caller is known is looked up again at the end.
        if kept_out:
            for strangers in _pieces(strange):
                still = [connection for connection, _ in strangers if not self._ledger.found(connection.peer).known]
                yield from self._end(_FLOOD, still, drops_calls=True)
            return
        refused = [stranger for stranger in strange if stranger[1].refused and not stranger[1].muted]
        waiting = [connection for connection, account in strange if not (account.refused or account.muted)]
        excess = {**_refused_excess(refused), **_waiting_excess(waiting)}
        for some in _pieces(excess.items()):
            yield
            unmuted = [
                connection
                for connection, muted_s in some
                if not (self._ledger.found(connection.peer).known or self._mute(connection, muted_s))
            ]
            yield from self._end(_FLOOD, unmuted, drops_calls=True)

    def _end_talkers(self, look: _Look, found: Iterable[InboundConnection]) -> Iterator[None]:
        """End the connections that brought far more data than their calls, or mute those of a host that floods.

        It yields after each piece of the work.
        """
        talkers: list[InboundConnection] = []
        earlier, self._traffic = self._traffic, {}
        for piece in _pieces(found):
            talkers += self._idle_talkers(piece, earlier)
            yield
        for host in {connection.host for connection in talkers} - set(look.floods) if self._share < 1 else ():
            self._keep_out(host)
        for piece in _pieces(talkers):
            ended = [connection for connection in piece if not self._is_silenced(look, connection)]
            event = "connections were ended, because they brought far more data than their calls"
            yield from self._end(event, ended, drops_calls=True)

    def _is_silenced(self, look: _Look, connection: InboundConnection) -> bool:
        """Return whether a connection is muted, and mute it if it would come again with new calls once it is ended."""
        account = self._ledger.found(connection.peer)
        if account.muted:
            return True
        if account.known or self._share >= 1 or (self._banned is not None and self._banned.has(connection.host)):
            return False
        floods = connection.host in look.repelled or account.refused > 0
        return floods and self._mute(connection, _MUTED_S)

    def _mute(self, connection: InboundConnection, muted_s: float) -> bool:
        """Drop what a connection sends for `muted_s` from now on. Return False if the system cannot do that."""
        with _duplicate(connection) as duplicate:
            if duplicate is None or not mute(duplicate):
                return False
        self._ledger.mute(connection.peer)
        self._muted_until[connection] = time.monotonic() + muted_s
        self._ended[_FLOOD] += 1
        return True

    def _over(self) -> list[InboundConnection]:
        now = time.monotonic()
        return [connection for connection, until in self._muted_until.items() if until <= now]

    def _end_muted(self) -> Iterator[None]:
        """End the connections that were muted for long enough. It yields after each piece of the work."""
        for piece in _pieces(self._over()):
            for connection in piece:
                del self._muted_until[connection]
                self._ledger.end(connection.peer)
                end(connection)
            yield

    def _keep_out(self, host: str) -> bool:
        """Ban a host unless a known caller used it within the last day. Return whether it is banned."""
        if self._banned is None or self._ledger.knows(host) or not self._banned.ban(host):
            return False
        self._ledger.set_banned(self._banned.hosts())
        return True

    def _end(self, event: str, ended: Iterable[InboundConnection], *, drops_calls: bool = False) -> Iterator[None]:
        """End connections. It yields after each piece of the work.

        Args:
            drops_calls: Whether calls that they left in gRPC's queue are dropped without an answer, as they always are
                if their host is banned. Another client that gets the same port within seconds would have to retry.
        """
        for piece in _pieces(ended):
            for connection in piece:
                if end(connection):
                    self._ended[event] += 1
                    if drops_calls or (self._banned is not None and self._banned.has(connection.host)):
                        self._ledger.end(connection.peer)
            yield

    def _log(self) -> None:
        if not self._ended.total() or time.monotonic() - self._logged_at < _LOG_S:
            return
        for event, count in self._ended.items():
            if count:
                _log.warning(event, extra={"ended": count, "max_connections": self._max_connections})
        self._ended.clear()
        self._logged_at = time.monotonic()

    def _idle_talkers(
        self, found: Iterable[InboundConnection], earlier: Mapping[InboundConnection, _Traffic]
    ) -> Iterator[InboundConnection]:
        """Yield the connections that received far more bytes than their calls explain."""
        for connection in found:
            account = self._ledger.found(connection.peer)
            before = earlier.get(connection) or _Traffic(at=time.monotonic())
            now = before.with_more(_idle_bytes(connection), account.explained_bytes)
            self._traffic[connection] = now
            most = _ARRIVING_BYTES if account.reading else _IDLE_TALK_BYTES
            if now.unexplained_bytes > most:
                yield connection

    def _too_many(self, found: Collection[InboundConnection], busy: Collection[str]) -> Iterable[InboundConnection]:
        """Yield the connections to end. They are chosen at random, because it is unknown which ones are harmless."""
        by_host: dict[str, list[InboundConnection]] = defaultdict(list)
        for connection in found:
            by_host[connection.host].append(connection)
        free = self._max_connections - len(found)
        for held in sorted(by_host.values(), key=len, reverse=True):
            idle = [connection for connection in held if connection.peer not in busy]
            random.shuffle(idle)
            left = len(held)
            while idle and fair_room(free=free, held=left, share=self._share) < 0:
                yield idle.pop()
                left, free = left - 1, free + 1


def _refused_excess(refused: list[_Stranger]) -> dict[InboundConnection, float]:
    """Return the seconds for which to mute those connections with refused calls that are not served on."""
    refused.sort(key=lambda stranger: stranger[1].refused)
    served = [account for _, account in refused[:_STRANGE_CONNECTIONS] if account.refused <= _STRANGE_CALLS]
    return {connection: _MUTED_S for connection, _ in refused[len(served) :]}


def _waiting_excess(waiting: list[InboundConnection]) -> dict[InboundConnection, float]:
    """Return the seconds for which to mute those connections whose first call still waits that are too many."""
    # A flood brings more calls than a tenant that has just connected.
    waiting.sort(key=lambda connection: connection.received_bytes)
    excess = {}
    for place, connection in enumerate(waiting):
        is_new = connection.received_bytes <= _NEW_BYTES
        if place >= (_NEW_CONNECTIONS if is_new else _WAITING_CONNECTIONS):
            excess[connection] = _NEW_MUTED_S if is_new else _MUTED_S
    return excess


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The reasons for one check of a port's connections."""

    port: int
    crowded: bool
    working: bool
    floods: frozenset[str]
    admitted: frozenset[str]
    """Hosts that were kept out until a short time ago."""

    @property
    def repelled(self) -> frozenset[str]:
        """Hosts of whose connections only a few are served."""
        return self.floods | self.admitted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traffic:
    """A leaky bucket of the received bytes that a connection's calls do not explain."""

    at: float
    idle_bytes: float = 0.0
    """Bytes received, less the control frames that the bytes sent may have caused."""
    explained_bytes: int = 0
    unexplained_bytes: float = 0.0

    def with_more(self, idle_bytes: float, explained_bytes: int) -> _Traffic:
        """Return the bucket after more bytes. Bytes explained earlier do not excuse bytes that arrive later."""
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
    """Return `_Traffic.idle_bytes` of a connection so far."""
    return connection.received_bytes - _TALK_PER_SENT_BYTE * connection.acknowledged_bytes


def _acknowledged_and_received(opened: socket.socket) -> tuple[int, int]:
    info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    if len(info) < _TCP_INFO_BYTES:
        return 0, 0
    acknowledged, received = struct.unpack_from("=QQ", info, _ACKNOWLEDGED_AT)
    return acknowledged, received


def _finish(pieces: Iterator[None]) -> None:
    """Do all pieces of some work."""
    for _ in pieces:
        pass


def _pieces(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    """Yield the items in lists of `_PIECE`."""
    rest = iter(items)
    while piece := list(itertools.islice(rest, _PIECE)):
        yield piece


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
            )


def end(connection: InboundConnection) -> bool:
    """Shut a connection down as if its client had closed it. gRPC, which owns the descriptor, then closes it.

    Return False if the descriptor belongs to another connection by now.
    """
    with _duplicate(connection) as duplicate:
        if duplicate is None:
            return False
        with contextlib.suppress(OSError):
            duplicate.shutdown(socket.SHUT_RDWR)
            unmute(duplicate)  # else the system would wait for the client to acknowledge the end, which is dropped
            return True
    return False


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
