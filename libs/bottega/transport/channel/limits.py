"""The most that an end of a link receives."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from bottega.transport.layout import ALIGNMENT_BYTES, MAX_LAYOUT_BYTES

MAX_SLOTS = 64
MAX_LAYOUTS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of what is received; together slots x slot_bytes of memory at most, taken only as messages need it, and
    once more of files that messages carry.

    slots: messages under way or held at once, the credit. slot_bytes: of one message, and of its file.
    layouts: how many are remembered; the sender forgets the one that it has not used for longest.
    Raises ValueError for values that no link can have.
    """

    slots: int = 2
    slot_bytes: int = 256 << 20
    layouts: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= MAX_SLOTS:
            raise ValueError(f"a link has 1 to {MAX_SLOTS} slots, not {self.slots}")
        if not ALIGNMENT_BYTES <= self.slot_bytes <= MAX_LAYOUT_BYTES:
            raise ValueError(f"a slot has {ALIGNMENT_BYTES} to {MAX_LAYOUT_BYTES} bytes, not {self.slot_bytes}")
        if not 1 <= self.layouts <= MAX_LAYOUTS:
            raise ValueError(f"a link remembers 1 to {MAX_LAYOUTS} layouts, not {self.layouts}")

    @property
    def segment_bytes(self) -> int:
        """A slot in whole pages."""
        return -(-self.slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
