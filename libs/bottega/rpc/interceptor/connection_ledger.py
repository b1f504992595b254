"""What the calls of each connection account for, which the guard of connections compares with what came over it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from bottega.rpc.peers import Peer

# Connections whose calls are remembered.
_MOST_ACCOUNTS = 16_384
# What a call may bring beside messages that are read: its metadata, and what gRPC takes in before it is looked at.
_CALL_BYTES = 96 << 10
# Calls that a host may make in a second without being known, before its connections are ended.
_STRANGE_PER_S = 1000
# The shortest time over which that is counted.
_COUNTED_S = 0.25


@dataclass(slots=True)
class ConnectionAccount:
    """What is known of the calls of one connection."""

    known: bool = False
    """Whether somebody who is known has called: a proxy's connection may carry strangers' calls as well."""
    explained_bytes: int = 0
    """Bytes that its calls may have brought, so far."""
    reading: int = 0
    """Calls whose next message is waited for: some of it may be here."""


class ConnectionLedger:
    """What the calls of each connection account for, and how often strangers call, by host."""

    def __init__(self) -> None:
        self._refused = Counter[str]()
        self._since = time.monotonic()
        self._accounts: dict[str, ConnectionAccount] = {}  # by connection, the newest last

    def account(self, peer: Peer) -> ConnectionAccount:
        """Return the account of a connection, for a call that begins."""
        account = self._accounts.get(peer.connection)
        if account is None:
            account = self._accounts[peer.connection] = ConnectionAccount()
            if len(self._accounts) > _MOST_ACCOUNTS:
                del self._accounts[next(iter(self._accounts))]
        account.explained_bytes += _CALL_BYTES
        return account

    def refused(self, peer: Peer) -> None:
        """Count a call of a stranger."""
        self._refused[peer.host] += 1

    def floods(self) -> frozenset[str]:
        """Return the hosts that have made too many such calls since the last time."""
        now = time.monotonic()
        most = _STRANGE_PER_S * max(now - self._since, _COUNTED_S)
        hosts = frozenset(host for host, count in self._refused.items() if count > most)
        self._refused.clear()
        self._since = now
        return hosts

    def found(self, connection: str) -> ConnectionAccount:
        """Return the account of a connection that is open; an empty one where there was no call."""
        return self._accounts.get(connection) or ConnectionAccount()
