"""Limits on the number and the bytes of unfinished uploads, in all and for each host."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from bottega.errors import QueueFull

# Some running uploads have ended by then.
_RETRY_S = 5.0


class UploadLimits:
    """The unfinished uploads, by host.

    Args:
        max_uploads: Maximum number of unfinished uploads. One host may have half of them, but at least one.
        max_total_bytes: Maximum size of unfinished uploads. One host may have half of it, but at least `max_bytes`.
        max_bytes: Maximum size of one upload.
    """

    def __init__(self, *, max_uploads: int, max_total_bytes: int, max_bytes: int) -> None:
        self._max_uploads = max_uploads
        self._max_total_bytes = max_total_bytes
        self._max_host_uploads = max(1, max_uploads // 2)
        self._max_host_bytes = max(max_bytes, max_total_bytes // 2)
        self._number: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    @contextlib.contextmanager
    def admitted(self, host: str, size_bytes: int) -> Iterator[None]:
        """Count an upload for the duration of the block. Raises QueueFull if a limit is reached."""
        number, total_bytes = self._number.total(), self._bytes.total()
        if number >= self._max_uploads or total_bytes + size_bytes > self._max_total_bytes:
            state = f"the store has {number} unfinished uploads of {total_bytes} bytes, and accepts"
            raise _full(state, self._max_uploads, self._max_total_bytes)
        number, total_bytes = self._number[host], self._bytes[host]
        if number >= self._max_host_uploads or total_bytes + size_bytes > self._max_host_bytes:
            state = f"your host has {number} unfinished uploads of {total_bytes} bytes, and the store accepts from one"
            raise _full(f"{state} host", self._max_host_uploads, self._max_host_bytes)
        self._number[host] += 1
        self._bytes[host] += size_bytes
        try:
            yield
        finally:
            # Subtracting a Counter also drops hosts without uploads.
            self._number -= Counter({host: 1})
            self._bytes -= Counter({host: size_bytes})


def _full(state: str, max_uploads: int, max_bytes: int) -> QueueFull:
    return QueueFull(f"{state} {max_uploads} of {max_bytes} bytes at once; try again soon", retry_after_s=_RETRY_S)
