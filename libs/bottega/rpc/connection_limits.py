"""Limits on the connections to a server's port, and the guard that ends connections which harm other clients.

gRPC limits the total number of connections, but not those of one host, which could take all of them and do nothing. So
the guard ends connections without calls if their host has more than its share.

It ends two kinds of connections even if they have calls, because gRPC does not end them: those of a host that floods
the server with calls without being known (see FloodDefence), and those that bring far more data than their calls, such
as pings. (gRPC ends a connection that pings too often only after its last answer was sent, and each ping causes another
answer.) A host that does the latter is banned, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import random
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from bottega.background_tasks import running
from bottega.clocks import seconds_until_tick
from bottega.fair_order import fair_room
from bottega.process import open_files
from bottega.rpc.flood_defence import FloodDefence, SuspectHosts
from bottega.rpc.inbound_connections import InboundConnection, Traffic, connections, in_pieces, open_file_count
from bottega.rpc.interceptor.connection_ledger import ConnectionLedger
from bottega.rpc.source_filter import listening_sockets

# Part of the file descriptors for the connections of one port. A service may listen on two ports; the rest is for
# files, links and child processes.
_PART_OF_OPEN_FILES = 3
# Seconds between two checks. Connections that open meanwhile must fit between the guard's limit and gRPC's.
_ROUND_S = 0.25
# The same while the process is at rest, with less than half of the open files that a crowded port has.
_REST_ROUND_S = 1.0
_REST_SHARE = 0.5
# After so long at rest the guard sleeps until a connection is opened or a call comes. It still checks now and then,
# because open connections may keep the process busy, and gRPC may accept a connection before the event loop sees it.
_SLEEP_AFTER_S = 10.0
_SLEEP_ROUND_S = 5.0
# The same during a flood: its host makes some hundred calls in this time.
_FLOOD_ROUND_S = 0.05
# gRPC's limit relative to the guard's, so that one host's excess is ended before others find no room.
_GRPC_SHARE = 1.25
# Share of a core from which on the traffic of each connection is checked.
_BUSY_SHARE = 0.25
# Bytes that a connection may bring at once besides its calls; see also Traffic.
_IDLE_TALK_BYTES = 512 << 10
# The same while a message is arriving, which is counted only when it is complete.
_ARRIVING_BYTES = 32 << 20

_log = logging.getLogger(__name__)


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
        self._traffic: dict[InboundConnection, Traffic] = {}
        self._processor_s, self._checked_at = time.process_time(), time.monotonic()
        self._stirred_at = self._checked_at

    @contextlib.asynccontextmanager
    async def looking(self, port: int) -> AsyncIterator[None]:
        """Guard a port while the block runs."""
        async with running(self._guard(port)):
            yield

    async def _guard(self, port: int) -> None:
        # A host that may have all connections is a proxy: its connections also carry calls of tenants.
        defence = FloodDefence(port, self._ledger, keeps_out=self._share < 1)
        pause_s = _ROUND_S
        while True:
            await self._ledger.wait_for_flood(pause_s)
            pause_s = _ROUND_S
            try:
                suspects, crowding, working = defence.suspects(), self._crowding(), self._is_working()
                crowded = crowding > 1.0
                if crowded or suspects.all or working or defence.over():
                    look = _Look(port=port, crowded=crowded, working=working, suspects=suspects)
                    began_s = time.monotonic()
                    await self._look(defence, look)
                    took_s = time.monotonic() - began_s
                    await asyncio.sleep(_FLOOD_ROUND_S if suspects.floods else max(_FLOOD_ROUND_S, 3 * took_s))
                if suspects.on_probation:
                    pause_s = 0.0  # its connections are looked at before its calls are
                elif crowding >= _REST_SHARE or suspects.floods or working:
                    self._stirred_at = time.monotonic()
                elif defence.is_over and time.monotonic() - self._stirred_at > _SLEEP_AFTER_S:
                    await self._sleep(port)
                else:
                    pause_s = seconds_until_tick(_REST_ROUND_S)
            except OSError as error:
                _log.warning("the server's connections cannot be inspected", extra={"why": str(error)})

    async def _sleep(self, port: int) -> None:
        """Wait until a connection is opened, a call comes, or there is another reason for frequent rounds."""
        with _calling_back(port, self._ledger.wake):
            while not await self._ledger.wait_for_work(seconds_until_tick(_SLEEP_ROUND_S)):
                if self._is_working() or self._crowding() >= _REST_SHARE:
                    break
        self._processor_s, self._checked_at = time.process_time(), time.monotonic()
        self._stirred_at = self._checked_at

    def _crowding(self) -> float:
        """Return the open files and sockets, relative to a host's share. Up to 1, no host exceeds it."""
        return open_file_count() / (self._share * self._max_connections)

    def _is_working(self) -> bool:
        """Return whether the process has used much of a core since the last round."""
        processor_s, now = time.process_time(), time.monotonic()
        used = processor_s - self._processor_s > _BUSY_SHARE * (now - self._checked_at)
        self._processor_s, self._checked_at = processor_s, now
        return used

    async def _look(self, defence: FloodDefence, look: _Look) -> None:
        """Look at all connections, and end or mute some."""
        # It takes 50 ms for 4,000 connections, so a thread does it. During a flood a thread would wait for the event
        # loop at each system call.
        pieces = self._look_in_pieces(defence, look, frozenset(self._busy()))
        if not look.suspects.all:
            await asyncio.to_thread(_finish, pieces)
            return
        for _ in pieces:
            await asyncio.sleep(0)

    def _look_in_pieces(self, defence: FloodDefence, look: _Look, busy: Collection[str]) -> Iterator[None]:
        """Look at all connections, and yield after each piece of the work."""
        yield from defence.end_muted()
        if not (look.crowded or look.suspects.all or look.working):
            return
        found: list[InboundConnection] = []
        for piece in in_pieces(connections(look.port)):
            found += piece
            yield
        if look.crowded:
            yield from defence.end(
                "connections without calls were ended, because their host had more than its share",
                self._too_many(found, busy),
            )
        yield from defence.look(look.suspects, found)
        if look.working:
            yield from self._end_talkers(defence, look.suspects, found)
        defence.log(max_connections=self._max_connections)

    def _end_talkers(
        self, defence: FloodDefence, suspects: SuspectHosts, found: Iterable[InboundConnection]
    ) -> Iterator[None]:
        """End the connections that brought far more data than their calls, or mute those of a host that floods.

        It yields after each piece of the work.
        """
        talkers: list[InboundConnection] = []
        earlier, self._traffic = self._traffic, {}
        for piece in in_pieces(found):
            talkers += self._idle_talkers(piece, earlier)
            yield
        for host in {connection.host for connection in talkers} - suspects.floods:
            defence.keep_out(host)
        for piece in in_pieces(talkers):
            ended = [connection for connection in piece if not defence.is_silenced(suspects, connection)]
            event = "connections were ended, because they brought far more data than their calls"
            yield from defence.end(event, ended, drops_calls=True)

    def _idle_talkers(
        self, found: Iterable[InboundConnection], earlier: Mapping[InboundConnection, Traffic]
    ) -> Iterator[InboundConnection]:
        """Yield the connections that received far more bytes than their calls explain."""
        for connection in found:
            account = self._ledger.found(connection.peer)
            before = earlier.get(connection) or Traffic(at=time.monotonic())
            now = before.with_more(connection, account.explained_bytes)
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


@contextlib.contextmanager
def _calling_back(port: int, on_connection: Callable[[], None]) -> Iterator[None]:
    """Call `on_connection` in the event loop whenever a client connects to a port of this process."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        for listening in listening_sockets(port):
            duplicate = stack.enter_context(socket.socket(fileno=os.dup(listening.fileno())))
            loop.add_reader(duplicate, on_connection)
            stack.callback(loop.remove_reader, duplicate)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The reasons for one check of a port's connections."""

    port: int
    crowded: bool
    working: bool
    suspects: SuspectHosts


def _finish(pieces: Iterator[None]) -> None:
    """Do all pieces of some work."""
    for _ in pieces:
        pass
