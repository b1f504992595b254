"""How many uploads may be unfinished at once, and of how many bytes: in all, and by one host."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from bottega.errors import QueueFull

# Uploads under way end, or have become LoRAs, by then.
_RETRY_S = 5.0


class UploadLimits:
    """most, most_bytes: of all uploads at once. One host may have half of each, but always one upload of max_bytes."""

    def __init__(self, *, most: int, most_bytes: int, max_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._host_most = max(1, most // 2)
        self._host_bytes = max(max_bytes, most_bytes // 2)
        self._number: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextlib.contextmanager
    def admitted(self, host: str, size_bytes: int) -> Iterator[None]:
        """Counts an upload in the block. Raises QueueFull where there is no room for it now."""
        number, sizes = self._number.total(), self._bytes.total()
        if number >= self._most or sizes + size_bytes > self._most_bytes:
            said = f"the store has {number} unfinished uploads of {sizes} bytes, and takes"
            raise _full(said, self._most, self._most_bytes)
        number, sizes = self._number[host], self._bytes[host]
        if number >= self._host_most or sizes + size_bytes > self._host_bytes:
            said = f"your host has {number} unfinished uploads of {sizes} bytes, and the store takes from one host"
            raise _full(said, self._host_most, self._host_bytes)
        self._number[host] += 1
        self._bytes[host] += size_bytes
        try:
            yield
        finally:
            # Hosts without an upload are forgotten.
            self._number -= Counter({host: 1})
            self._bytes -= Counter({host: size_bytes})


def _full(said: str, most: int, most_bytes: int) -> QueueFull:
    return QueueFull(f"{said} {most} of {most_bytes} bytes at once; try again soon", retry_after_s=_RETRY_S)
