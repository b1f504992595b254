"""Finished images by content hash, within a budget of bytes and time. Knows no jobs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from bottega.errors import TooLarge
from bottega.gateway.clock import Clock
from bottega.process import copied


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    data: bytes
    until: float


class ResultStore:
    """Keeps the newest images; the oldest go when the budget or their time is used up."""

    def __init__(self, *, budget_bytes: int, ttl_s: float, clock: Clock) -> None:
        self._budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self.size_bytes = 0

    def put(self, digest: str, data: bytes) -> None:
        """Keeps an image under its digest. Raises TooLarge for one that is beyond the whole budget."""
        if len(data) > self._budget_bytes:
            limit = str(self._budget_bytes)
            raise TooLarge(f"an image is over {limit} bytes", metadata={"results_bytes": limit})
        self._drop(digest)
        self._kept[digest] = _Kept(data=data, until=self._clock.monotonic() + self._ttl_s)
        self.size_bytes += len(data)
        while self.size_bytes > self._budget_bytes:
            self._drop(next(iter(self._kept)))

    def get(self, digest: str) -> bytes | None:
        """The image, or None when it has gone."""
        kept = self._kept.get(digest)
        return kept.data if kept and kept.until > self._clock.monotonic() else None

    def sweep(self) -> None:
        """Drops what has expired. All live equally long, so the oldest are first."""
        now = self._clock.monotonic()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._drop(next(iter(self._kept)))

    def _drop(self, digest: str) -> None:
        kept = self._kept.pop(digest, None)
        if kept:
            self.size_bytes -= len(kept.data)


async def digest(data: bytes) -> str:
    """SHA-256 in hex, off the event loop where it would hold it up."""
    return await copied(len(data), lambda: hashlib.sha256(data).hexdigest())
