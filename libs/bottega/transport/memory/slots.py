"""Slots: memory that one message after the other lies in, and where its tensors are."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from bottega.transport.layout import Layout
from bottega.transport.memory.mappings import private_slot


class Slot:
    """One slot's memory. The views of its latest layout are kept: nearly every message has that of the one before."""

    __slots__ = ("_layout", "_views", "memory")

    def __init__(self, mapping: mmap.mmap) -> None:
        self.memory = memoryview(mapping)
        self._layout: Layout | None = None
        self._views: tuple[memoryview, ...] = ()

    def __len__(self) -> int:
        return len(self.memory)

    def views(self, layout: Layout) -> tuple[memoryview, ...]:
        """Where each tensor of the layout lies; the slot is large enough."""
        if self._layout is not layout:
            self._layout, self._views = layout, layout.views(self.memory)
        return self._views

    def pieces(self, layout: Layout, start: int, stop: int) -> list[memoryview]:
        """The bytes `start` to `stop` - 1 of a message, as they are sent."""
        return [self.memory[start:stop]]


class GrowingSlots:
    """Slots by index, made when they are first used. One that is too small becomes as large as the largest of them:
    which of them the next large message gets is chance."""

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}

    def get(self, index: int, size_bytes: int, allocate: Callable[[int], mmap.mmap] = private_slot) -> Slot:
        """The slot, with at least that many bytes. allocate: makes its memory; what it raises leaves no slot there."""
        found = self._slots.get(index)
        if found is None or len(found) < size_bytes:
            wanted_bytes = max(size_bytes, *(len(slot) for slot in self._slots.values()), 0)
            self._slots.pop(index, None)
            found = self._slots[index] = Slot(allocate(wanted_bytes))
        return found

    def clear(self) -> None:
        """Forgets all; memory that somebody looks at stays."""
        self._slots.clear()
