"""How this process keeps freed memory for the next picture, and how much memory it and its children use.

Fresh pages cost more than the copy that fills them: relaying an image of 8 MiB takes 25 to 120 ms of CPU on
the event loop where the C library gives memory back after every picture, and 4 ms where it keeps it (two
shared x86-64 cores, measured). It does not know what the memory is for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import psutil

# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The largest that the C library takes; larger blocks are mapped and unmapped each time.
_MAX_BLOCK_BYTES = 32 * 2**20
# An image as received, joined, parsed and packed again.
_KEPT_BYTES = 64 * 2**20
_PIECE_BYTES = 16 * 2**20


def keep_freed_memory() -> None:
    """Keeps up to 128 MiB of freed memory, 64 MiB of it from now on. Call it in the event loop's own thread.

    Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_MMAP_THRESHOLD, _MAX_BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, 2 * _KEPT_BYTES)
    touched = [b"\1" * _PIECE_BYTES for _ in range(_KEPT_BYTES // _PIECE_BYTES)]
    del touched


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together; those that are gone count nothing."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total
