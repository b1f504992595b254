"""What the calls of each connection account for, which the guard of connections compares with what came over it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from dataclasses import dataclass

from bottega.rpc.peers import Peer

# Connections whose calls are remembered.
_MOST_ACCOUNTS = 16_384
# What a call may bring beside messages that are read: its metadata, and what gRPC takes in before it is looked at.
_CALL_BYTES = 96 << 10
# Calls that a host may make in a second without being known, before its connections are ended: far fewer than a busy
# service looks at.
_STRANGE_CALLS, _COUNTED_S = 250, 1.0
# For which a host is remembered from which somebody called who is known.
_KNOWN_S = 3600.0
# For which calls of a connection that was ended may still come out of gRPC's queue; its host is kept out for longer.
_ENDED_S = 5.0


@dataclass(slots=True)
class ConnectionAccount:
    """An account of the calls of one connection."""

    known: bool = False
    """Whether somebody who is known has called: a proxy's connection may carry strangers' calls as well."""
    explained_bytes: int = 0
    """Bytes that its calls may have brought, so far."""
    reading: int = 0
    """Calls whose next message is waited for: some of it may be here."""
    ended_at: float = -math.inf
    """When the connection was ended and its host kept out."""

    @property
    def has_ended(self) -> bool:
        """Whether nobody hears an answer any more."""
        return time.monotonic() - self.ended_at < _ENDED_S


class ConnectionLedger:
    """The accounts of all connections, and the number of strangers' calls by host."""

    def __init__(self) -> None:
        self._refused = Counter[str]()
        self._since = time.monotonic()
        self._flood = asyncio.Event()
        self._known: dict[str, float] = {}  # by host, the last one last
        self._accounts: dict[str, ConnectionAccount] = {}  # by connection, the last used one last

    def account(self, peer: Peer) -> ConnectionAccount:
        """Return the account of a connection, for a call that begins."""
        # The account that was used last goes to the end: one of a connection that has calls is not forgotten.
        account = self._accounts.pop(peer.connection, ConnectionAccount())
        self._accounts[peer.connection] = account
        if len(self._accounts) > _MOST_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        account.explained_bytes += _CALL_BYTES
        return account

    def recognized(self, peer: Peer) -> None:
        """Note that somebody who is known calls from there."""
        self.found(peer.connection).known = True
        self._known.pop(peer.host, None)
        self._known[peer.host] = time.monotonic()
        if len(self._known) > _MOST_ACCOUNTS:
            del self._known[next(iter(self._known))]

    def knows(self, host: str) -> bool:
        """Return whether somebody who is known has called from there of late: other callers may come the same way."""
        return time.monotonic() - self._known.get(host, -math.inf) < _KNOWN_S

    def refused(self, peer: Peer) -> None:
        """Count a call of a stranger."""
        self._refused[peer.host] += 1
        if self._refused[peer.host] > _STRANGE_CALLS:
            self._flood.set()

    async def wait_for_flood(self, within_s: float) -> None:
        """Return when a host may have made too many such calls, or after so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._flood.wait()

    def floods(self) -> frozenset[str]:
        """Return the hosts that have made too many such calls of late, and have not been returned for them yet."""
        self._flood.clear()
        hosts = frozenset(host for host, count in self._refused.items() if count > _STRANGE_CALLS)
        for host in hosts:
            del self._refused[host]
        now = time.monotonic()
        if now - self._since >= _COUNTED_S:
            self._refused.clear()
            self._since = now
        return hosts

    def found(self, connection: str) -> ConnectionAccount:
        """Return the account of a connection that is open; an empty one where there was no call."""
        return self._accounts.get(connection) or ConnectionAccount()
