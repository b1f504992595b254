"""Accounts of the calls of each connection, which the connection guard compares with the traffic."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from dataclasses import dataclass

from bottega.rpc.address import Peer

# Connections whose calls are remembered.
_MAX_ACCOUNTS = 16_384
# Bytes that a call may bring besides the messages that are read: metadata, and what gRPC receives before the call is
# looked at.
_CALL_BYTES = 96 << 10
# Calls per second that a host may make without being known before its connections are ended. A busy service handles
# many more.
_STRANGE_CALLS, _COUNTED_S = 250, 1.0
# A host is remembered for a day after a known caller used it, so that a tenant's office stays known overnight.
_KNOWN_S = 86_400.0
# Calls of an ended connection may come out of gRPC's queue for so long.
_ENDED_S = 5.0


@dataclass(slots=True)
class ConnectionAccount:
    """An account of the calls of one connection."""

    known: bool = False
    """Whether a known caller has used it. A proxy's connection may carry calls of strangers as well."""
    refused: bool = False
    """Whether a stranger's call over it was refused."""
    explained_bytes: int = 0
    """Upper bound on the bytes that its calls have received so far."""
    reading: int = 0
    """Calls that wait for their next message, some of which may have arrived."""
    ended_at: float = -math.inf
    """Time at which the connection was ended and its queued calls were dropped."""
    muted: bool = False
    """Whether the connection's data is dropped, and its queued calls with it."""

    @property
    def drops_calls(self) -> bool:
        """Whether its calls are dropped without a response, which the client could not receive."""
        return self.muted or time.monotonic() - self.ended_at < _ENDED_S


class ConnectionLedger:
    """The accounts of all connections, and the number of strangers' calls by host."""

    def __init__(self) -> None:
        self._refused = Counter[str]()
        self._since = time.monotonic()
        self._flood = asyncio.Event()
        self._known: dict[str, float] = {}  # by host, least recently used first
        self._accounts: dict[str, ConnectionAccount] = {}  # by connection, least recently used first

    def account(self, peer: Peer) -> ConnectionAccount:
        """Return the account of a connection for a new call."""
        account = self._accounts.pop(peer.connection, ConnectionAccount())
        self._accounts[peer.connection] = account
        if len(self._accounts) > _MAX_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        account.explained_bytes += _CALL_BYTES
        return account

    def recognized(self, peer: Peer) -> None:
        """Record that a known caller uses the connection and the host."""
        self.found(peer.connection).known = True
        self._known.pop(peer.host, None)
        self._known[peer.host] = time.monotonic()
        if len(self._known) > _MAX_ACCOUNTS:
            del self._known[next(iter(self._known))]

    def knows(self, host: str) -> bool:
        """Return whether a known caller used the host within the last day."""
        return time.monotonic() - self._known.get(host, -math.inf) < _KNOWN_S

    def refused(self, peer: Peer) -> None:
        """Record a refused call of a stranger."""
        self.found(peer.connection).refused = True
        self._refused[peer.host] += 1
        if self._refused[peer.host] > _STRANGE_CALLS:
            self._flood.set()

    async def wait_for_flood(self, within_s: float) -> None:
        """Wait until a host may have made too many strangers' calls, or until the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._flood.wait()

    def floods(self) -> frozenset[str]:
        """Return the hosts that made too many strangers' calls in about a second. Each flood is returned once."""
        self._flood.clear()
        hosts = frozenset(host for host, count in self._refused.items() if count > _STRANGE_CALLS)
        for host in hosts:
            del self._refused[host]
        now = time.monotonic()
        if now - self._since >= _COUNTED_S:
            self._refused.clear()
            self._since = now
        return hosts

    def mute(self, connection: str) -> None:
        """Record that a connection's data is dropped, also if none of its calls was looked at yet."""
        self._accounts.setdefault(connection, ConnectionAccount()).muted = True

    def found(self, connection: str) -> ConnectionAccount:
        """Return the account of an open connection; an empty one if there was no call."""
        return self._accounts.get(connection) or ConnectionAccount()
