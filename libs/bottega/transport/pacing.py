"""Pacing of large transfers that are sent in pieces: they keep to a rate and let other messages pass in between.

This module knows neither links nor the content of the pieces.
"""

from __future__ import annotations

import time

# Target duration of a piece: other messages wait for the pieces that are under way.
_PIECE_S = 0.01
_FIRST_BYTES, _LEAST_BYTES = 64 << 10, 4 << 10


class RateLimiter:
    """A limiter that keeps a link to a number of bytes a second; 0 means no limit.

    Args:
        most_bytes: Maximum size of a piece, whatever the rate.
    """

    def __init__(self, bytes_per_s: int, *, most_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._most_bytes = most_bytes
        self._until = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until more may be sent."""
        return max(0.0, self._until - time.monotonic())

    @property
    def most_bytes(self) -> int:
        """Maximum size of the next piece."""
        if not self._bytes_per_s:
            return self._most_bytes
        return min(self._most_bytes, max(_LEAST_BYTES, int(self._bytes_per_s * _PIECE_S)))

    def spend(self, size_bytes: int) -> None:
        """Record that bytes were sent."""
        if self._bytes_per_s:
            self._until = max(self._until, time.monotonic()) + size_bytes / self._bytes_per_s


class PieceSize:
    """The size of the next piece: what the link moves in _PIECE_S, measured on earlier pieces.

    Args:
        slots: How many messages the receiver can hold. The time of slots + 1 pieces is measured: not all of them fit
            into the receiver, so it shows the speed of the link instead of free buffers.
    """

    def __init__(self, *, slots: int, most_bytes: int) -> None:
        self._measured_pieces = slots + 1
        self._most_bytes = most_bytes
        self._bytes = min(_FIRST_BYTES, most_bytes)
        self._pieces = 0
        self._since_s = 0.0

    def next(self) -> int:
        """Return the size of the next piece in bytes. Call it before each piece."""
        now_s = time.monotonic()
        if self._pieces == self._measured_pieces:
            took_s = (now_s - self._since_s) / self._measured_pieces
            if took_s < _PIECE_S / 2:
                self._bytes = min(2 * self._bytes, self._most_bytes)
            elif took_s > 2 * _PIECE_S:
                self._bytes = max(self._bytes // 2, _LEAST_BYTES)
            self._pieces = 0
        if not self._pieces:
            self._since_s = now_s
        self._pieces += 1
        return self._bytes
