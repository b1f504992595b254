"""A limit on what all clients of a server use, and on the share of each host."""

from __future__ import annotations

from collections import Counter

from bottega.rpc.address import host_of_address


class PeerLimit:
    """Counts what clients use: connections, requests or bytes.

    Args:
        most: Upper bound on the sum of all hosts.
        share: Share of `most` that one host may use.
    """

    def __init__(self, most: int, share: float) -> None:
        self._most = most
        self._most_of_host = max(1, int(most * share))
        self._by_host = Counter[str]()
        self.used = 0

    def take(self, address: str, amount: int = 1) -> bool:
        """Count what a client takes. Return False if there is no room."""
        host = host_of_address(address)
        if not amount:
            return True  # an entry of a host that takes nothing would stay
        if self.used + amount > self._most or self._by_host[host] + amount > self._most_of_host:
            return False
        self.used += amount
        self._by_host[host] += amount
        return True

    def give(self, address: str, amount: int = 1) -> None:
        """Count what a client gives back."""
        host = host_of_address(address)
        self.used -= amount
        self._by_host[host] -= amount
        if not self._by_host[host]:
            del self._by_host[host]
