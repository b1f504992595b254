"""Accounts of the calls of each connection, which the connection guard compares with the received bytes."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from dataclasses import dataclass

from bottega.rpc.address import Peer

# Upper bound on the connections that have an account.
_MAX_ACCOUNTS = 16_384
# Bytes that a call may bring besides the messages that are read: metadata, and what gRPC receives before it is
# handled.
_CALL_BYTES = 96 << 10
# Calls per second that a host may make without being known before its connections are ended. A busy service handles
# many more.
_STRANGE_CALLS, _COUNTED_S = 250, 1.0
# A host is remembered for a day after a known caller used it, so that a tenant's office stays known overnight.
_KNOWN_S = 86_400.0
# Seconds for which calls of an ended connection may still come out of gRPC's queue.
_ENDED_S = 5.0


@dataclass(slots=True)
class ConnectionAccount:
    """The account of the calls of one connection."""

    known: bool = False
    """Whether an authenticated caller has used it. A proxy's connection may also carry calls of unknown callers."""
    refused: int = 0
    """Number of calls of unknown callers over it that were refused."""
    explained_bytes: int = 0
    """Upper bound on the bytes that its calls have received so far."""
    reading: int = 0
    """Number of calls that wait for their next message, part of which may have arrived."""
    ended_at: float = -math.inf
    """Time at which the connection was ended and its queued calls were dropped; -inf before."""
    muted: bool = False
    """Whether the connection's data and its queued calls are dropped."""

    @property
    def waits(self) -> bool:
        """Whether none of its calls was answered yet."""
        return not (self.known or self.refused or self.muted)

    @property
    def drops_calls(self) -> bool:
        """Whether its calls are dropped without a response, which the client could not receive."""
        return self.muted or time.monotonic() - self.ended_at < _ENDED_S


class ConnectionLedger:
    """The accounts of all connections, and by host the number of calls of unknown callers."""

    def __init__(self) -> None:
        self._refused = Counter[str]()
        self._since = time.monotonic()
        self._woken = asyncio.Event()
        self._wakes_at_call = False
        self._known: dict[str, float] = {}  # by host, least recently used first
        self._accounts: dict[str, ConnectionAccount] = {}  # by connection, least recently used first
        self._banned: frozenset[str] = frozenset()

    def account(self, peer: Peer) -> ConnectionAccount:
        """Return the account of a connection for a new call."""
        account = self._kept(peer.connection)
        account.explained_bytes += _CALL_BYTES
        if self._wakes_at_call:
            self._woken.set()
        return account

    def recognized(self, peer: Peer) -> None:
        """Record that an authenticated caller uses the connection and the host."""
        self.found(peer.connection).known = True
        self._known.pop(peer.host, None)
        self._known[peer.host] = time.monotonic()
        if len(self._known) > _MAX_ACCOUNTS:
            del self._known[next(iter(self._known))]

    def knows(self, host: str) -> bool:
        """Return whether an authenticated caller used the host within the last day."""
        return time.monotonic() - self._known.get(host, -math.inf) < _KNOWN_S

    def refused(self, peer: Peer) -> None:
        """Record a refused call of an unknown caller."""
        self.found(peer.connection).refused += 1
        self._refused[peer.host] += 1
        if self._refused[peer.host] > _STRANGE_CALLS:
            self._woken.set()

    async def wait_for_flood(self, within_s: float) -> None:
        """Wait until a host may have made too many calls of unknown callers, or for `within_s` seconds."""
        await self._wait(within_s)

    async def wait_for_work(self, within_s: float) -> bool:
        """Wait until a call or `wake`, or for `within_s` seconds. Return whether there was one."""
        self._wakes_at_call = True
        try:
            return await self._wait(within_s)
        finally:
            self._wakes_at_call = False

    def wake(self) -> None:
        """End the wait of the guard."""
        self._woken.set()

    async def _wait(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                return await self._woken.wait()
        return False

    def floods(self) -> frozenset[str]:
        """Return the hosts of too many unknown callers' calls in about a second, each flood once."""
        self._woken.clear()
        hosts = frozenset(host for host, count in self._refused.items() if count > _STRANGE_CALLS)
        for host in hosts:
            del self._refused[host]
        now = time.monotonic()
        if now - self._since >= _COUNTED_S:
            self._refused.clear()
            self._since = now
        return hosts

    def mute(self, connection: str) -> None:
        """Record that a connection's data is dropped, also if none of its calls has been handled yet."""
        self._kept(connection).muted = True

    def set_banned(self, hosts: frozenset[str]) -> None:
        """Set the hosts whose unknown callers are kept out. Their queued calls are dropped."""
        self._banned = hosts

    def drops_calls(self, peer: Peer) -> bool:
        """Return whether calls over a connection are dropped without a response."""
        account = self.found(peer.connection)
        return account.drops_calls or (peer.host in self._banned and not account.known)

    def end(self, connection: str) -> None:
        """Record that a connection was ended, also if none of its calls has been handled yet."""
        account = self._kept(connection)
        # Another connection may get the same port.
        account.muted, account.ended_at = False, time.monotonic()

    def found(self, connection: str) -> ConnectionAccount:
        """Return the account of an open connection, or an empty one if it had no call."""
        return self._accounts.get(connection) or ConnectionAccount()

    def _kept(self, connection: str) -> ConnectionAccount:
        """Return the account of a connection, as the most recently used one."""
        account = self._accounts.pop(connection, None) or ConnectionAccount()
        self._accounts[connection] = account
        if len(self._accounts) > _MAX_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        return account
