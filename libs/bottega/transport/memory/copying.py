"""Copies between buffers: small ones at once, large ones by two threads.

One core alone does not use all that memory can move: two took .5 to .8 of its time (AMD EPYC, 2 cores, 108 MiB), and as
much as one where the second core slept and had to be woken, or had work of its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor

from bottega.transport.memory.mappings import address

# Below this, a plain assignment is quicker than leaving and taking the interpreter's lock.
_SMALL_BYTES = 64 << 10
# Below this, waking a thread takes a good part of what it saves.
_SHARED_BYTES = 4 << 20
# Few, because each ends with a wait for the interpreter's lock; more than two, because the other may begin late or be
# held up: the caller waits for one of its pieces at most.
_PIECES = 4


def copy(target: memoryview, source: memoryview) -> None:
    """Copies all of `source` to the front of `target`; both are flat bytes. Large copies let other threads run."""
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
    """Both threads copy pieces until none is left. Where the other is busy or late, the caller copies all itself."""
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
    """The other thread, which all links share; it ends with the process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")


def _cores() -> int:
    """How many this process may use now: operators pin and unpin while it runs."""
    return len(os.sched_getaffinity(0))
