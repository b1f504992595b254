"""The LoRAs in memory: within a budget of bytes and a number of files, what was used longest ago goes first.

Each of them holds a file descriptor of this process. Its calls are made under the lock of whoever has it. Knows no disk
and nothing of loads but when they end.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True, eq=False)
class CacheEntry:
    """A LoRA in memory, or on its way there until `loaded` ends.

    loans: being sent. awaits_fetch: it was loaded for a fetch that is still to come.
    """

    descriptor: int
    size_bytes: int
    loaded: Future[None] = field(default_factory=Future)
    awaits_fetch: bool
    loans: int = 0


class LruCache:
    """budget_bytes, most: of all together, most in number. pinned: stay once they are there."""

    def __init__(self, *, budget_bytes: int, most: int) -> None:
        self.pinned: frozenset[str] = frozenset()
        self._budget_bytes = budget_bytes
        self._most = most
        # The one used longest ago first.
        self._by_digest: OrderedDict[str, CacheEntry] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Of all."""
        return sum(resident.size_bytes for resident in self._by_digest.values())

    def get(self, digest: str) -> CacheEntry | None:
        """It is not used by that."""
        return self._by_digest.get(digest)

    def use(self, digest: str) -> CacheEntry | None:
        """The same, and now it is the one used last."""
        found = self._by_digest.get(digest)
        if found is not None:
            self._by_digest.move_to_end(digest)
        return found

    def add(self, digest: str, resident: CacheEntry) -> None:
        """There is room for it."""
        self._by_digest[digest] = resident

    def make_room(self, size_bytes: int) -> int | None:
        """Lets go what was used longest ago, as far as one more needs it. How many; None where none would help."""
        lack_bytes = self.used_bytes + size_bytes - self._budget_bytes
        lack = len(self._by_digest) + 1 - self._most
        victims = []
        for digest, resident in self._by_digest.items():
            if lack_bytes <= 0 and lack <= 0:
                break
            if resident.loaded.done() and not resident.loans and digest not in self.pinned:
                victims.append(digest)
                lack_bytes -= resident.size_bytes
                lack -= 1
        if lack_bytes > 0 or lack > 0:
            return None
        self.let_go(victims)
        return len(victims)

    def let_go(self, digests: Iterable[str]) -> None:
        """They are in memory no more."""
        for digest in digests:
            os.close(self._by_digest.pop(digest).descriptor)

    def clear(self) -> None:
        """Lets go all."""
        self.let_go(list(self._by_digest))
