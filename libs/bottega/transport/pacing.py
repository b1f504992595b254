"""How quickly something large is sent in pieces: within a rate, and so that others may speak between them.

Knows neither links nor what the pieces are.
"""

from __future__ import annotations

import time

# What a piece should take: whoever wants to speak waits for those that are under way.
_PIECE_S = 0.01
_FIRST_BYTES, _LEAST_BYTES = 64 << 10, 4 << 10


class RateLimiter:
    """Keeps a link to so many bytes a second; 0 does not. most_bytes: of a piece, whatever the rate."""

    def __init__(self, bytes_per_s: int, *, most_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._most_bytes = most_bytes
        self._until = 0.0

    @property
    def wait_s(self) -> float:
        """Until more may be sent."""
        return max(0.0, self._until - time.monotonic())

    @property
    def most_bytes(self) -> int:
        """Of a piece."""
        if not self._bytes_per_s:
            return self._most_bytes
        return min(self._most_bytes, max(_LEAST_BYTES, int(self._bytes_per_s * _PIECE_S)))

    def spend(self, size_bytes: int) -> None:
        """They were sent."""
        if self._bytes_per_s:
            self._until = max(self._until, time.monotonic()) + size_bytes / self._bytes_per_s


class PieceSize:
    """Bytes of the next piece: as many as the link carries in a moment, as far as its earlier pieces have shown.

    slots: messages that the receiver takes in at once. So many pieces more than those cannot all be under way: what
    they take is what the link carries, and not what its ends have room for.
    """

    def __init__(self, *, slots: int, most_bytes: int) -> None:
        self._measured_pieces = slots + 1
        self._most_bytes = most_bytes
        self._bytes = min(_FIRST_BYTES, most_bytes)
        self._pieces = 0
        self._since_s = 0.0

    def next(self) -> int:
        """Called before each piece."""
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
