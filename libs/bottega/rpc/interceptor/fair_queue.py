"""A queue of calls that wait for room, served in fair turns: one host after the other, and of each host one connection
after the other.

So a host with a thousand waiting calls delays another one by one call at most.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bottega.rpc.peers import Peer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CallTurn:
    """A call that waits."""

    peer: Peer
    come: asyncio.Future[None]
    """Done when the call goes on."""


class FairQueue:
    """Calls that wait, by host and connection. `bool(queue)` is False when none does."""

    def __init__(self) -> None:
        # By host and by connection; whose turn is next comes first. Nobody has an empty line.
        self._hosts: dict[str, dict[Peer, deque[CallTurn]]] = {}

    def __bool__(self) -> bool:
        return bool(self._hosts)

    def has(self, peer: Peer) -> bool:
        """Return whether a call of that connection waits."""
        return peer in self._hosts.get(peer.host, ())

    def add(self, peer: Peer) -> CallTurn:
        """Join the queue."""
        turn = CallTurn(peer=peer, come=asyncio.get_running_loop().create_future())
        self._hosts.setdefault(peer.host, {}).setdefault(peer, deque()).append(turn)
        return turn

    def pop(self, *, host: Callable[[str], bool], connection: Callable[[Peer], bool]) -> CallTurn | None:
        """Take out the next in turn.

        Args:
            host: Whether a host may go on now; those that may not are passed over, and keep their place.
            connection: The same of a connection of such a host.
        """
        for name, peers in self._hosts.items():
            if not host(name):
                continue
            for peer, line in peers.items():
                if connection(peer):
                    return self._popped(peer, line)
        return None

    def remove(self, turn: CallTurn) -> None:
        """Leave the queue."""
        connections = self._hosts[turn.peer.host]
        connections[turn.peer].remove(turn)
        if not connections[turn.peer]:
            del connections[turn.peer]
        if not connections:
            del self._hosts[turn.peer.host]

    def _popped(self, peer: Peer, line: deque[CallTurn]) -> CallTurn:
        """The first of a line; its connection and its host go to the end."""
        connections = self._hosts.pop(peer.host)
        del connections[peer]
        turn = line.popleft()
        if line:
            connections[peer] = line
        if connections:
            self._hosts[peer.host] = connections
        return turn
