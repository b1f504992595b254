"""Keeps memory management from delaying the event loop and forward passes, and measures memory.

Fresh pages cost more than the copy that fills them. Receiving an image of 8 MiB takes 15 to 120 ms of CPU on the event
loop if the C library returns memory after every picture, and 2 ms if it keeps it (two shared x86-64 cores, measured). A
forward pass on the CPU frees and allocates its activations at every step: one of 130 ms takes 5 ms less if they stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import math
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path

import psutil

from bottega.background_tasks import running
from bottega.clocks import seconds_until_tick

_ROOT = Path("/")

# Age in seconds from which a MemoryMeter measures again.
_LOOK_S = 1.0
# <malloc.h>
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
# The largest value that the C library accepts. Larger blocks are mapped and unmapped each time.
_MAX_BLOCK_BYTES = 32 * 2**20
# An image as received, joined, parsed and packed again.
IMAGE_AT_WORK_BYTES = 64 * 2**20
_KEPT_BYTES = 2 * IMAGE_AT_WORK_BYTES
_PIECE_BYTES = 16 * 2**20
# New objects before the collector runs; Python's default is 700. A call makes dozens of objects that are freed when it
# ends. With hundreds of calls at once the collector ran in vain, for a tenth of the CPU time of each call.
_YOUNG_OBJECTS = 10_000
# A process is at rest if it used less than this share of a core for this long. A caller that sends an image every few
# seconds must not wait for fresh pages each time.
_AT_REST = 0.1
_REST_S = 5.0
# Share of that time after which it may end early, together with other timers.
_LEAST_REST = 0.9
_WORTH_BYTES = 2**20
# What /proc/PID/clear_refs takes for: the highest resident memory is that of now.
_RESET_PEAK = "5"

_log = logging.getLogger(__name__)


def keep_freed_memory(*, at_once_bytes: int = 0) -> None:
    """Keep up to 128 MiB of freed memory. Allocate `at_once_bytes` of it now, so that the first image is fast, too.

    Call it before there are other threads. Does nothing if the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    mallopt(_M_ARENA_MAX, 1)  # the event loop frees what threads allocate; a thread's own arena would be unmapped
    mallopt(_M_MMAP_THRESHOLD, _MAX_BLOCK_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    touched = [b"\1" * _PIECE_BYTES for _ in range(at_once_bytes // _PIECE_BYTES)]
    del touched


def tune_garbage_collector() -> None:
    """Run Python's garbage collector rarely and never on imported objects. Call it after imports."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


@contextlib.asynccontextmanager
async def trimmed_at_rest() -> AsyncIterator[None]:
    """Return freed memory to the system whenever this process becomes idle while the block runs.

    Otherwise the process keeps what its largest requests needed together. Only protobuf returns some memory by itself,
    at every 10,000th block that it frees.
    """
    async with running(_trim_while_at_rest(_RestDetector())):
        yield


def trim_at_rest() -> None:
    """Return freed memory when this process is idle. A thread does it, for processes without an event loop."""
    threading.Thread(target=_trim_always, args=(_RestDetector(),), name="giving back", daemon=True).start()


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the total resident memory of these processes; processes that have ended are skipped."""
    total = 0
    for pid in pids:
        try:
            total += psutil.Process(pid).memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def measure_peak_bytes(run: Callable[[], object]) -> int | None:
    """Return by how many bytes the resident memory of this process rose at most while `run` ran.

    Memory that was freed and kept is returned first, because `run` would use it again. The process's own record of its
    highest memory (`VmHWM`) is reset. Returns None where the kernel has no such record.
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
    """Measures the resident memory of a service's processes.

    Args:
        pids: Returns the process IDs; called for each measurement.
    """

    def __init__(self, pids: Callable[[], Iterable[int]]) -> None:
        self._pids = pids
        self._resident_bytes = 0
        self._due_at = -math.inf

    @property
    def resident_bytes(self) -> int:
        """The resident memory, measured at most a second ago. If it cannot be measured, the last value."""
        now = time.monotonic()
        if now >= self._due_at:
            self._due_at = now + _LOOK_S
            try:
                self._resident_bytes = resident_bytes(self._pids())
            except Exception:  # noqa: BLE001 - a report of load must not fail because of a figure
                _log.exception("memory could not be measured")
        return self._resident_bytes


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


class _RestDetector:
    """Detects whether the process was idle since the last call, and whether it has memory to return."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._used_s = time.process_time()
        self._kept_bytes = 0

    def is_at_rest(self) -> bool:
        """Return whether it was idle since the last call and its memory has grown since the last `trim`."""
        before_s, self._used_s = self._used_s, time.process_time()
        if self._trim is None or self._used_s - before_s >= _AT_REST * _REST_S:
            return False
        return resident_bytes([os.getpid()]) > self._kept_bytes + _WORTH_BYTES

    def trim(self) -> None:
        """Return freed memory to the system, which takes some milliseconds."""
        assert self._trim is not None
        self._trim(0)
        self._kept_bytes = resident_bytes([os.getpid()])


async def _trim_while_at_rest(rest: _RestDetector) -> None:
    while True:
        await asyncio.sleep(seconds_until_tick(_REST_S, least_share=_LEAST_REST))
        if rest.is_at_rest():
            gc.collect()  # garbage that the rare collector has not seen yet
            await asyncio.to_thread(rest.trim)


def _trim_always(rest: _RestDetector) -> None:
    """Return memory when idle, without calling the collector, which runs often in an engine."""
    while True:
        time.sleep(seconds_until_tick(_REST_S, least_share=_LEAST_REST))
        if rest.is_at_rest():
            rest.trim()


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return how many more bytes this process can use before the kernel ends a process; None outside of Linux.

    That is what the machine and its cgroups leave. Pages of files count as available, as in the kernel's own
    `MemAvailable`: they are dropped before anything is ended. This takes about a tenth of a millisecond.

    Args:
        root: The folder that contains `proc` and `sys`.
    """
    try:
        of_machine = 1024 * _numbers(root / "proc" / "meminfo")["MemAvailable"]
    except (OSError, KeyError):
        return None
    return min([of_machine, *_of_cgroups(root)])


def _of_cgroups(root: Path) -> Iterator[int]:
    """Yield the remaining bytes of each control group of this process with a limit, in both versions of cgroups."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    mounts = root / "sys" / "fs" / "cgroup"
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers:
            yield from _left(mounts, path, limit="memory.max", usage="memory.current", prefix="")
        elif "memory" in controllers.split(","):
            names = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes"}
            yield from _left(mounts / "memory", path, **names, prefix="total_")


def _left(mount: Path, path: str, *, limit: str, usage: str, prefix: str) -> Iterator[int]:
    """Yield the remaining bytes of a control group and of its parents.

    In a container the path may be that of the machine, of which only the container's own group is mounted.
    """
    own = Path(path.lstrip("/"))
    for group in (own, *own.parents) if ".." not in own.parts else (Path(),):
        folder = mount / group
        try:
            limit_bytes = int((folder / limit).read_text(encoding="ascii"))
            used_bytes = int((folder / usage).read_text(encoding="ascii"))
            pages = _numbers(folder / "memory.stat")
        except (OSError, ValueError):
            continue  # it has no limit ("max"), or is not mounted here
        of_files = sum(pages.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        yield max(0, limit_bytes - used_bytes + of_files)


def _numbers(path: Path) -> Mapping[str, int]:
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) > 1}
