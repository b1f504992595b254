"""A queue of calls that wait for room, served in fair turns: one host after the other, and of each host one connection
after the other.

So a host with a thousand waiting calls delays another one by one call at most.
"""

from __future__ import annotations

import asyncio
from collections import deque

from bottega.rpc.peers import Peer

Turn = asyncio.Future[None]


class FairQueue:
    """Empty is false."""

    def __init__(self) -> None:
        # By host and by connection; whose turn is next comes first. Nobody has an empty line.
        self._hosts: dict[str, dict[str, deque[Turn]]] = {}

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def add(self, peer: Peer) -> Turn:
        """Joins the queue."""
        turn: Turn = asyncio.get_running_loop().create_future()
        self._hosts.setdefault(peer.host, {}).setdefault(peer.connection, deque()).append(turn)
        return turn

    def pop(self) -> Turn:
        """The next in turn. There must be one."""
        host = next(iter(self._hosts))
        connection = next(iter(self._hosts[host]))
        connections = self._hosts.pop(host)
        line = connections.pop(connection)
        turn = line.popleft()
        if line:
            connections[connection] = line
        if connections:
            self._hosts[host] = connections
        return turn

    def remove(self, peer: Peer, turn: Turn) -> None:
        """Leaves the queue."""
        connections = self._hosts[peer.host]
        connections[peer.connection].remove(turn)
        if not connections[peer.connection]:
            del connections[peer.connection]
        if not connections:
            del self._hosts[peer.host]
