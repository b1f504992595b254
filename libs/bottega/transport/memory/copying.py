"""Copies between buffers: small ones directly, large ones with two threads.

One core alone does not use the full memory bandwidth. Two took .5 to .8 of its time (AMD EPYC, 2 cores, 108 MiB), and
as much as one if the second core slept or was busy.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from bottega.transport.memory.mappings import address

# Below this, a plain assignment is faster than releasing and taking the interpreter's lock.
_SMALL_BYTES = 64 << 10
# Below this, waking a thread costs much of what it saves.
_SHARED_BYTES = 4 << 20
# Few, because each ends with a wait for the interpreter's lock. More than two, because the other thread may start late
# or be held up: the caller then waits for at most one of its pieces.
_PIECES = 4


def copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the front of `target`; both are flat bytes. Large copies let other threads run."""
    size = len(source)
    if size <= _SMALL_BYTES:
        target[:size] = source
    elif size > len(target):
        raise ValueError(f"{size} bytes do not fit into {len(target)}")
    elif size < _SHARED_BYTES or _cores() == 1:
        ctypes.memmove(address(target), address(source), size)
    else:
        _by_two(address(target), address(source), size)


def _by_two(target: int, source: int, size: int) -> None:
    """Copy in two threads that take pieces until none is left. If the other is late, the caller copies everything."""
    piece = -(-size // _PIECES)
    starts = deque(range(0, size, piece))

    def copy_pieces() -> None:
        while True:
            try:
                start = starts.popleft()
            except IndexError:
                return
            ctypes.memmove(target + start, source + start, min(piece, size - start))

    helping = _second().submit(copy_pieces)
    copy_pieces()
    if not helping.cancel():
        helping.result()


@functools.cache
def _second() -> ThreadPoolExecutor:
    """Return the other thread, which all links share and which ends with the process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")


def _cores() -> int:
    """Return how many cores this process may use now. Operators change the affinity while it runs."""
    return len(os.sched_getaffinity(0))
