"""The defence of a port against hosts that make many calls without being known: bans, muted and ended connections.

Such a host is banned for some time, because each new connection would bring new calls, and gRPC queues those of all
hosts together.

A host may be a NAT with tenants behind it. If a known caller used it within the last day, it is not banned. If tenants
behind it are not known yet, or not known any more, they can connect between two bans (see SourceFilter), and then the
host is known. While a host is not banned, its connections with refused calls are muted and, among those whose first
call still waits, the ones with most data: what they send is dropped for some time, and then they are ended. If they
were ended at once, they would come again with new calls.

After a ban the connections of a flood come back at once, each with hundreds of calls. So bulk data of a host on
probation is dropped (see SourceFilter), and one connection after another is let through. If some of them still wait at
the end of the probation, the host is banned again.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bottega.rpc.inbound_connections import InboundConnection, end, in_pieces, let_through, mute
from bottega.rpc.interceptor.connection_ledger import ConnectionAccount, ConnectionLedger
from bottega.rpc.source_filter import SourceFilter

# A flooding host is kept out for so long, and then not again for half of it: a client's connection attempt, which is
# repeated after 1, 3 and 7 s, mostly succeeds meanwhile.
_BANNED_S, _PROBATION_S = 10.0, 5.0
# If a flooding host is not kept out, so many of its connections with at most so many refused calls each are served on.
# The others are muted for so long, and then ended.
_STRANGE_CONNECTIONS, _STRANGE_CALLS = 2, 100
_MUTED_S = 10.0
# The same for its connections whose first call still waits, and for those among them that brought no more bytes
# than a client needs for its first calls. Both kinds can bring some 3,000 calls: gRPC reads up to 640 of a connection,
# and a short one takes 35 bytes.
_WAITING_CONNECTIONS = 4
_NEW_CONNECTIONS, _NEW_BYTES, _NEW_MUTED_S = 32, 4 << 10, 2.0
# One connection of a host on probation is let through at a time, because it may bring hundreds of calls, and each costs
# time again when it is ended. It has so long for its first call: a client sends again what was dropped within twice the
# time for which it was dropped.
_LET_THROUGH_S = 1.0
# After a probation the system may still hand over connections that were opened during it.
_FREED_S = 5.0
# Seconds between two log lines about the same event.
_LOG_S = 10.0
_FLOOD = "connections were ended or muted, because a host made many calls without being known"

_log = logging.getLogger(__name__)

_Stranger = tuple[InboundConnection, ConnectionAccount]
"""A connection that no known caller has used, with its account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectHosts:
    """The hosts whose connections are looked at because of a flood."""

    floods: frozenset[str]
    """Hosts that have just made many calls without being known."""
    on_probation: frozenset[str]
    """Hosts that were kept out until a short time ago."""
    freed: frozenset[str]
    """Hosts whose probation has just ended."""

    @property
    def repelled(self) -> frozenset[str]:
        """Hosts of whose connections only a few are served."""
        return self.floods | self.on_probation

    @property
    def all(self) -> frozenset[str]:
        return self.repelled | self.freed


class FloodDefence:
    """Bans hosts that flood a port, and ends or mutes their connections.

    Generators of its methods yield after each piece of their work, because the event loop does it during a flood.

    Args:
        port: The port.
        ledger: The accounts of the connections' calls.
        keeps_out: Whether hosts may be banned. If not, each may be a proxy with tenants behind it, and no connection is
            ended or muted because of other calls of its host.
    """

    def __init__(self, port: int, ledger: ConnectionLedger, *, keeps_out: bool) -> None:
        self._ledger = ledger
        self._keeps_out = keeps_out
        self._banned = SourceFilter(port, banned_s=_BANNED_S, probation_s=_PROBATION_S)
        self._muted_until: dict[InboundConnection, float] = {}
        self._let_through: dict[InboundConnection, float] = {}
        """Times at which connections of hosts on probation were let through."""
        self._freed: dict[str, float] = {}
        """Hosts whose probation has ended, and the times until which their connections are let through."""
        self._ended = Counter[str]()
        self._logged_at = -_LOG_S

    def suspects(self) -> SuspectHosts:
        """End bans and probations whose time is over, and return the hosts to look at."""
        now = time.monotonic()
        self._freed = {host: until for host, until in self._freed.items() if until > now}
        for host in self._banned.on_probation():
            if self._ledger.knows(host):  # it needs no more than the defence against floods
                self._banned.trust(host)
        if self._banned.is_due():
            self._freed |= dict.fromkeys(self._banned.lift(), now + _FREED_S)
            self._ledger.set_banned(self._banned.hosts())
        return SuspectHosts(
            floods=self._ledger.floods(), on_probation=self._banned.on_probation(), freed=frozenset(self._freed)
        )

    @property
    def is_over(self) -> bool:
        """Whether no host is kept out or suspect, and no connection is muted."""
        return not (self._muted_until or self._freed or self._banned.hosts() or self._banned.on_probation())

    def over(self) -> list[InboundConnection]:
        """Return the connections that were muted for long enough."""
        now = time.monotonic()
        return [connection for connection, until in self._muted_until.items() if until <= now]

    def end_muted(self) -> Iterator[None]:
        """End the connections that were muted for long enough."""
        for piece in in_pieces(self.over()):
            for connection in piece:
                del self._muted_until[connection]
                self._ledger.end(connection.peer)
                end(connection)
            yield

    def look(self, suspects: SuspectHosts, found: Iterable[InboundConnection]) -> Iterator[None]:
        """End, mute or let through connections of suspect hosts.

        Args:
            suspects: The hosts.
            found: All connections of the port.
        """
        for host in suspects.all if self._keeps_out else ():
            yield from self._look_at(host, suspects, [connection for connection in found if connection.host == host])
        if self._let_through:
            present = set(found)
            self._let_through = {known: since for known, since in self._let_through.items() if known in present}

    def keep_out(self, host: str) -> bool:
        """Ban a host unless a known caller used it within the last day. Return whether it is banned."""
        if not self._keeps_out or self._ledger.knows(host) or not self._banned.ban(host):
            return False
        self._ledger.set_banned(self._banned.hosts())
        self._freed.pop(host, None)
        return True

    def is_silenced(self, suspects: SuspectHosts, connection: InboundConnection) -> bool:
        """Return whether a connection is muted, and mute it if it would come again with new calls once it is ended."""
        account = self._ledger.found(connection.peer)
        if account.muted:
            return True
        if account.known or not self._keeps_out or self._banned.has(connection.host):
            return False
        floods = connection.host in suspects.repelled or account.refused > 0
        return floods and self._mute(connection, _MUTED_S)

    def end(self, event: str, ended: Iterable[InboundConnection], *, drops_calls: bool = False) -> Iterator[None]:
        """End connections.

        Args:
            event: The reason, for the log.
            ended: The connections.
            drops_calls: Whether calls that they left in gRPC's queue are dropped without an answer, as they always are
                if their host is banned. Another client that gets the same port within seconds would have to retry.
        """
        for piece in in_pieces(ended):
            for connection in piece:
                if end(connection):
                    self._ended[event] += 1
                    if drops_calls or self._banned.has(connection.host):
                        self._ledger.end(connection.peer)
            yield

    def log(self, *, max_connections: int) -> None:
        """Log how many connections were ended or muted, unless that was done a short time ago."""
        if not self._ended.total() or time.monotonic() - self._logged_at < _LOG_S:
            return
        for event, count in self._ended.items():
            _log.warning(event, extra={"ended": count, "max_connections": max_connections})
        self._ended.clear()
        self._logged_at = time.monotonic()

    def _look_at(self, host: str, suspects: SuspectHosts, of_host: list[InboundConnection]) -> Iterator[None]:
        held = self._held(of_host) if host not in suspects.floods else []
        goes_on = host in suspects.freed and len(held) > _WAITING_CONNECTIONS
        if (host in suspects.floods or goes_on) and self.keep_out(host):
            yield from self._end_strangers(of_host)
            return
        if host in suspects.freed:
            yield from self._let(of_host)
        elif host in suspects.on_probation:
            underway = self._underway(of_host)
            if held and not underway:
                yield from self._let([random.choice(held)])
            left_alone = {*held, *underway}
            of_host = [connection for connection in of_host if connection not in left_alone]
        if host in suspects.repelled:
            yield from self._mute_excess(of_host)

    def _held(self, of_host: Iterable[InboundConnection]) -> list[InboundConnection]:
        """Return the connections whose first call waits because bulk data of their host is dropped."""
        return [
            connection
            for connection in of_host
            if connection.dropped_packets
            and connection not in self._let_through
            and self._ledger.found(connection.peer).waits
        ]

    def _underway(self, of_host: Iterable[InboundConnection]) -> list[InboundConnection]:
        """Return the connections that were let through a short time ago, and whose first call is not answered yet."""
        since = time.monotonic() - _LET_THROUGH_S
        return [
            connection
            for connection in of_host
            if self._let_through.get(connection, -math.inf) > since and self._ledger.found(connection.peer).waits
        ]

    def _let(self, chosen: Iterable[InboundConnection]) -> Iterator[None]:
        """Receive everything that connections send, unless they are muted."""
        for piece in in_pieces(chosen):
            for connection in piece:
                if connection not in self._muted_until:
                    self._let_through[connection] = time.monotonic()
                    let_through(connection)
            yield

    def _strangers(self, of_host: Iterable[InboundConnection], strange: list[_Stranger]) -> Iterator[None]:
        """Add the connections that no known caller has used to `strange`."""
        for piece in in_pieces(of_host):
            accounts = ((connection, self._ledger.found(connection.peer)) for connection in piece)
            strange += [(connection, account) for connection, account in accounts if not account.known]
            yield

    def _end_strangers(self, of_host: Iterable[InboundConnection]) -> Iterator[None]:
        """End the connections of a banned host. Those of known callers are not affected."""
        strange: list[_Stranger] = []
        yield from self._strangers(of_host, strange)
        # Calls are authenticated between pieces, so whether a caller is known is looked up again at the end.
        for strangers in in_pieces(strange):
            still = [connection for connection, _ in strangers if not self._ledger.found(connection.peer).known]
            yield from self.end(_FLOOD, still, drops_calls=True)

    def _mute_excess(self, of_host: Iterable[InboundConnection]) -> Iterator[None]:
        """Mute some connections of a flooding host that is not banned. Those of known callers are not affected."""
        strange: list[_Stranger] = []
        yield from self._strangers(of_host, strange)
        refused = [stranger for stranger in strange if stranger[1].refused and not stranger[1].muted]
        waiting = [connection for connection, account in strange if account.waits]
        excess = {**_refused_excess(refused), **_waiting_excess(waiting)}
        for some in in_pieces(excess.items()):
            yield
            unmuted = [
                connection
                for connection, muted_s in some
                if not (self._ledger.found(connection.peer).known or self._mute(connection, muted_s))
            ]
            yield from self.end(_FLOOD, unmuted, drops_calls=True)

    def _mute(self, connection: InboundConnection, muted_s: float) -> bool:
        """Drop what a connection sends for `muted_s` from now on. Return False if the system cannot do that."""
        if not mute(connection):
            return False
        self._ledger.mute(connection.peer)
        self._muted_until[connection] = time.monotonic() + muted_s
        self._ended[_FLOOD] += 1
        return True


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
