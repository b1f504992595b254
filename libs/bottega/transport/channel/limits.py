"""The limits on the messages that one end of a link receives, and the deadlines of calls."""

from __future__ import annotations

import math
import mmap
import time
from dataclasses import dataclass

from bottega.transport.layout import ALIGNMENT_BYTES, MAX_LAYOUT_BYTES

MAX_SLOTS = 64
MAX_LAYOUTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A time on time.monotonic() until which calls may wait. Several calls may share a deadline."""

    at: float
    """The time in seconds of time.monotonic(). It is finite, because every wait must end."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.at):
            raise ValueError(f"a deadline must be finite; got {self.at}")

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """Return the deadline `seconds` from now. 0 means not to wait at all."""
        return cls(at=time.monotonic() + seconds)

    def left_s(self) -> float:
        """Return the seconds that are left, never below 0."""
        return max(self.at - time.monotonic(), 0.0)

    def sooner(self, seconds: float) -> Deadline:
        """Return this deadline, or the one `seconds` from now if that is earlier."""
        return Deadline(at=min(self.at, time.monotonic() + seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the messages that one end of a link receives: slots x slot_bytes of memory, and as much for files.

    The memory is allocated only as messages need it. Raises ValueError for values out of range.
    """

    slots: int = 2
    """Number of messages that may be on their way or kept at the same time: the sender's credit."""
    slot_bytes: int = 256 << 20
    """Upper bound on the bytes of one message, and of its file."""
    layouts: int = 64
    """Number of layouts that are remembered. Beyond it, the sender drops the least recently used one."""

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"a link has 1 to {MAX_SLOTS} slots, not {self.slots}")
        if not ALIGNMENT_BYTES <= self.slot_bytes <= MAX_LAYOUT_BYTES:
            raise ValueError(f"a slot has {ALIGNMENT_BYTES} to {MAX_LAYOUT_BYTES} bytes, not {self.slot_bytes}")
        if not 1 <= self.layouts <= MAX_LAYOUTS:
            raise ValueError(f"a link remembers 1 to {MAX_LAYOUTS} layouts, not {self.layouts}")

    @property
    def segment_bytes(self) -> int:
        """Size of a slot in whole pages."""
        return -(-self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
