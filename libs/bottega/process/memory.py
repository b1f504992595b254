"""How this process keeps memory management off its event loop or its forwards, and how much memory it and its children
use.

Fresh pages cost more than the copy that fills them: receiving an image of 8 MiB takes 15 to 120 ms of CPU on
the event loop where the C library gives memory back after every picture, and 2 ms where it keeps it (two
shared x86-64 cores, measured). A forward on the CPU frees and takes its activations again at every step: one of 130 ms
costs 5 ms less where they stay. It does not know what the memory is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import psutil

from bottega.background_tasks import running

_log = logging.getLogger(__name__)

# Between two looks of a MemoryMeter.
_LOOK_S = 1.0
# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# The largest that the C library takes; larger blocks are mapped and unmapped each time.
_MAX_BLOCK_BYTES = 32 * 2**20
# An image as received, joined, parsed and packed again.
IMAGE_AT_WORK_BYTES = 64 * 2**20
_KEPT_BYTES = 2 * IMAGE_AT_WORK_BYTES
_PIECE_BYTES = 16 * 2**20
# Objects made, and not yet gone, until the collector looks at them; Python's own is 700. A call makes dozens that go by
# themselves when it ends: with hundreds of calls at once it looked in vain, for a tenth of the CPU time of each.
_YOUNG_OBJECTS = 10_000
# A process is at rest when it has used less than this share of a core for so long: a caller that sends an image every
# few seconds must not wait for fresh pages each time.
_AT_REST = 0.1
_REST_S = 5.0
_WORTH_BYTES = 2**20
# What /proc/PID/clear_refs takes for: the highest resident memory is that of now.
_RESET_PEAK = "5"


def keep_freed_memory(*, at_once_bytes: int = 0) -> None:
    """Keeps up to 128 MiB of freed memory, `at_once_bytes` of it from now on, for whom the first image is too late.

    Call it before there are other threads. Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)  # what a thread fills, the event loop frees: a thread's own arena would be unmapped there
    mallopt(_M_MMAP_THRESHOLD, _MAX_BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    touched = [b"\1" * _PIECE_BYTES for _ in range(at_once_bytes // _PIECE_BYTES)]
    del touched


def tune_garbage_collector() -> None:
    """Lets it look seldom, never at what was imported: a full look costs 5 ms and more. Call it after imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


@contextlib.asynccontextmanager
async def trimmed_at_rest() -> AsyncIterator[None]:
    """In the block, memory that was freed is given back whenever this process comes to rest.

    Else it is what the largest requests so far have taken at once. Of its own accord only protobuf gives some back, at
    every 10,000th block that it frees, whatever goes on then.
    """
    async with running(_trim_while_at_rest(_RestDetector())):
        yield


def trim_at_rest() -> None:
    """The same from now on up to the end of a process without an event loop, by a thread of its own."""
    threading.Thread(target=_trim_always, args=(_RestDetector(),), name="giving back", daemon=True).start()


def resident_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes together; those that are gone count nothing."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def measure_peak_bytes(run: Callable[[], object]) -> int | None:
    """Return how much more memory of this process was resident at a time while `run` ran than before it.

    Memory that was freed and kept is given back first, because `run` would use it again. The process's own record of
    its highest memory (`VmHWM`) begins anew. Returns None where the kernel has no such record.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
        before = _status_bytes("VmRSS")
    except OSError:
        run()
        return None
    run()
    return max(0, _status_bytes("VmHWM") - before)


class MemoryMeter:
    """Resident memory of a service's processes, as it was at the last look. pids: called for each look."""

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self.resident_bytes = 0

    async def run(self) -> None:
        """Looks every second, until cancelled."""
        while True:
            try:
                self.resident_bytes = resident_bytes(self._pids())
            except Exception:  # noqa: BLE001 - the boundary of the task: without it the figure would stay for ever
                _log.exception("memory could not be measured")
            await asyncio.sleep(_LOOK_S)


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


class _RestDetector:
    """Looked at every _REST_S, it knows whether the process was at rest for so long, and what there may be to give."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._used_s = time.process_time()
        self._kept_bytes = 0

    def is_at_rest(self) -> bool:
        """Since it was asked the last time; and the process is larger than it was left."""
        before_s, self._used_s = self._used_s, time.process_time()
        if self._trim is None or self._used_s - before_s >= _AT_REST * _REST_S:
            return False
        return resident_bytes([os.getpid()]) > self._kept_bytes + _WORTH_BYTES

    def trim(self) -> None:
        """Takes some milliseconds."""
        assert self._trim is not None
        self._trim(0)
        self._kept_bytes = resident_bytes([os.getpid()])


async def _trim_while_at_rest(rest: _RestDetector) -> None:
    while True:
        await asyncio.sleep(_REST_S)
        if rest.is_at_rest():
            gc.collect()  # of what a collector that looks seldom has not seen yet
            await asyncio.to_thread(rest.trim)


def _trim_always(rest: _RestDetector) -> None:
    """Leaves the collector alone: that of an engine is Python's own, which looks often."""
    while True:
        time.sleep(_REST_S)
        if rest.is_at_rest():
            rest.trim()
