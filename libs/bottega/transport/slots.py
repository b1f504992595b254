"""Slots that belong to one process. It knows no message."""

from __future__ import annotations

import mmap

from bottega.transport.memory import private_slot


class PrivateSlots:
    """Memory of this process by index; it grows to the largest message that was asked for."""

    def __init__(self) -> None:
        self._slots: dict[int, mmap.mmap] = {}
        self._largest_bytes = 0

    def get(self, index: int, size_bytes: int) -> memoryview:
        """The slot, with at least that many bytes. Raises NoSharedMemory."""
        self._largest_bytes = max(self._largest_bytes, size_bytes)
        found = self._slots.get(index)
        if found is None or len(found) < size_bytes:
            self._slots.pop(index, None)
            found = self._slots[index] = private_slot(self._largest_bytes)
        return memoryview(found)

    def clear(self) -> None:
        """Forgets all; memory that somebody looks at stays."""
        self._slots.clear()
