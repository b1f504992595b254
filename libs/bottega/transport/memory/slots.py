"""Slots: memory that holds one message after another."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from bottega.transport.layout import Layout
from bottega.transport.memory.mappings import private_slot


class Slot:
    """The memory of one slot, with the views of its latest layout cached: most messages repeat the last layout."""

    __slots__ = ("_layout", "_views", "memory")

    def __init__(self, mapping: mmap.mmap) -> None:
        self.memory = memoryview(mapping)
        self._layout: Layout | None = None
        self._views: tuple[memoryview, ...] = ()

    def __len__(self) -> int:
        return len(self.memory)

    def views(self, layout: Layout) -> tuple[memoryview, ...]:
        """Return the memory of each tensor of the layout. The slot is large enough."""
        if self._layout is not layout:
            self._layout, self._views = layout, layout.views(self.memory)
        return self._views

    def pieces(self, layout: Layout, start: int, stop: int) -> list[memoryview]:
        """Return bytes `start` to `stop` - 1 of a message, in the form in which they are sent."""
        return [self.memory[start:stop]]


class GrowingSlots:
    """Slots by index, allocated at first use.

    A slot that is too small grows to the size of the largest slot, because any slot may get the next large message.
    """

    def __init__(self) -> None:
        self._slots: dict[int, Slot] = {}

    def get(self, index: int, size_bytes: int, allocate: Callable[[int], mmap.mmap] = private_slot) -> Slot:
        """Return the slot, with at least that many bytes.

        Args:
            allocate: Allocates the memory of a slot; if it raises, the index has no slot.
        """
        found = self._slots.get(index)
        if found is None or len(found) < size_bytes:
            wanted_bytes = max(size_bytes, *(len(slot) for slot in self._slots.values()), 0)
            self._slots.pop(index, None)
            found = self._slots[index] = Slot(allocate(wanted_bytes))
        return found

    def clear(self) -> None:
        """Forget all slots. Memory that is still referenced stays valid."""
        self._slots.clear()
