"""The memory of messages: slots, private or shared by two processes; sealed files; and copies between buffers.

A mapping is never closed, only dropped: closing it under a tensor that still uses it would crash the process. The
system unmaps it when nothing refers to it any more.

A message may carry a file between processes of one host: anonymous memory that both ends read. Only fully sealed memory
is accepted: no process, not even the sender, can write, shorten or punch it any more. Its content stays as it was
checked, without a copy, and reading it never faults. The reader of a plain file gets SIGBUS if somebody shortens it.

Small buffers are copied directly, large ones with two threads: one core alone does not use the full memory bandwidth.
Two took .5 to .8 of its time (AMD EPYC, 2 cores, 108 MiB), and as much as one if the second core slept or was busy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from bottega.errors import BadFrame, NoSharedMemory
from bottega.process import open_files
from bottega.transport.layout import Layout

# Below this, a plain assignment is faster than releasing and taking the interpreter's lock.
_SMALL_BYTES = 64 << 10
# Below this, waking a thread costs much of what it saves.
_SHARED_BYTES = 4 << 20
# Few, because each ends with a wait for the interpreter's lock. More than two, because the other thread may start late
# or be held up: the caller then waits for at most one of its pieces.
_PIECES = 4
# From <linux/fcntl.h>; Python's fcntl has the other constants.
_F_SEAL_FUTURE_WRITE = 0x0010
# The size can never change and no page can be removed, so reading never faults. Receivers cannot write.
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
# From <linux/mman.h>, since Linux 5.14.
_MADV_POPULATE_READ = 22
# From <asm-generic/mman-common.h>; Python's mmap does not have it.
_MAP_FIXED = 0x10
# Reserved places that could not be mapped over. The system may have reused them since, so they are never unmapped.
_LOST: list[mmap.mmap] = []
_FILE_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def private_slot(size_bytes: int) -> mmap.mmap:
    """Return page-aligned memory of this process with all pages allocated. Raises NoSharedMemory."""
    with _no_memory(size_bytes):
        return mmap.mmap(-1, _pages(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


def shared_slot(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Return memory to write and share: a file descriptor for the peer, which the caller closes, and its mapping.

    Every page is reserved first, so a system without memory raises NoSharedMemory here, instead of SIGBUS later.
    """
    size = _pages(size_bytes)
    with _no_memory(size):
        descriptor = os.memfd_create("bottega-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, size)
            mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor, mapping


def received_slot(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Return the peer's memory, read-only.

    Raises BadFrame unless it is sealed, fully allocated and as large as announced; NoSharedMemory.
    """
    _check_slot(descriptor, size_bytes)
    mapping = read_only(descriptor, size_bytes)
    with suppress(OSError):  # an older system maps each page at its first use
        mapping.madvise(_MADV_POPULATE_READ)
    return mapping


def read_only(descriptor: int, size_bytes: int) -> mmap.mmap:
    """Return the pages of a file, read-only. Raises NoSharedMemory.

    Python and torch treat the mapping as writable (torch warns about memory that is not), but the system does not: a
    write ends the process with SIGSEGV. The alternative, a private copy of the page, would silently hide every later
    message in it.

    The file is mapped over a place that Python reserved and will unmap. A file that Python maps itself keeps a
    descriptor open as long as the mapping lives, and only bytes are bounded here, not the number of mappings.
    """
    with _no_memory(size_bytes):
        place = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flags = mmap.MAP_PRIVATE | _MAP_FIXED
    if _libc().mmap(address(place), size_bytes, mmap.PROT_READ, flags, descriptor, 0) != address(place):
        cause = errno.errorcode.get(ctypes.get_errno(), "unknown")
        _LOST.append(place)
        raise NoSharedMemory(f"{size_bytes} shared bytes cannot be mapped ({cause})", metadata={"cause": cause})
    return place


def address(buffer: object) -> int:
    """Return the address of a buffer's bytes, which may be read-only. The caller keeps the buffer alive."""
    view = _PyBuffer()
    _get_buffer()(buffer, ctypes.byref(view), 0)
    found = int(view.buf or 0)
    _release_buffer()(ctypes.byref(view))
    return found


def sharing_failure() -> str:
    """Share one page as a test. Return why sharing does not work, or ""."""
    try:
        descriptor, _ = shared_slot(mmap.PAGESIZE)
        try:
            received_slot(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
    except (AttributeError, BadFrame, NoSharedMemory) as error:
        return f"this process cannot share memory: {error}"
    return ""


def _check_slot(descriptor: int, size_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise BadFrame("the peer sent a file that is not shared memory") from None
    status = os.fstat(descriptor)
    if seals & _SEALS != _SEALS:
        raise BadFrame("the peer sent memory that is not sealed: it could be removed while we read it")
    if status.st_size != size_bytes or size_bytes % mmap.PAGESIZE or status.st_blocks * 512 < size_bytes:
        raise BadFrame(f"the peer announced a slot of {size_bytes} bytes and sent one of {status.st_size}")


@contextmanager
def _no_memory(size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        cause = errno.errorcode.get(error.errno or 0, "unknown")
        if open_files.is_cause(error):
            raise NoSharedMemory(open_files.too_many(error).message, metadata={"cause": cause}) from error
        message = f"no memory for a slot of {size_bytes} bytes ({cause}): free memory, or lower the link's slot_bytes"
        raise NoSharedMemory(message, metadata={"cause": cause}) from error


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class _PyBuffer(ctypes.Structure):
    """Py_buffer of the stable ABI (PEP 3118). ctypes itself gives addresses of writable buffers only."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


@functools.cache
def _get_buffer() -> Any:
    function = ctypes.pythonapi.PyObject_GetBuffer
    function.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
    return function


@functools.cache
def _release_buffer() -> Any:
    function = ctypes.pythonapi.PyBuffer_Release
    function.argtypes = (ctypes.c_void_p,)
    function.restype = None
    return function


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    libc.mmap.restype = ctypes.c_void_p
    return libc


def copy(target: memoryview, source: memoryview) -> None:
    """Copy all of `source` to the start of `target`; both are flat bytes. Large copies let other threads run."""
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
    """Copy in two threads that take pieces until none is left. If one is late, the caller copies everything."""
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
    """Return the thread that helps to copy large parts. All links share it, and it ends with the process."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")


def _cores() -> int:
    """Return how many cores this process may use now. It is not cached, because operators may change the affinity."""
    return len(os.sched_getaffinity(0))


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
        """Return the memory of each tensor of the layout. The slot must be large enough."""
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
        """Drop all slots. Memory that is still referenced stays valid."""
        self._slots.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """A memory file to send. Its creator may close the descriptor at any time: the receiver keeps a sent file."""

    descriptor: int
    size_bytes: int


def new_file(name: str) -> int:
    """Create an empty memory file, and return its descriptor, which the caller closes. Raises OSError.

    Args:
        name: Shown by tools that inspect the process.
    """
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Allocate all of the file's memory, so that no later write fails. Raises OSError.

    All of it must then be written.
    """
    if size_bytes:
        os.posix_fallocate(descriptor, 0, size_bytes)


def seal(descriptor: int) -> None:
    """Seal the file, so that nobody can change it any more. Raises OSError while a writable mapping exists."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FILE_SEALS)


def received_file(descriptor: int, size_bytes: int) -> memoryview:
    """Return a file's read-only bytes, valid as long as something refers to them. The caller closes the descriptor.

    A write ends the process, although Python and torch treat the bytes as writable. Raises BadFrame unless the file is
    sealed, fully allocated and as large as announced; NoSharedMemory.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise BadFrame("the peer sent a file of a disk: somebody could shorten it while we read it") from None
    if seals & _FILE_SEALS != _FILE_SEALS:
        raise BadFrame("the peer sent a file that is not sealed: somebody could change it while we read it")
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes != size_bytes:
        raise BadFrame(f"the peer announced a file of {size_bytes} bytes and sent one of {found_bytes}")
    # Blocks are not counted: they may lie after the end, with holes before it.
    if os.lseek(descriptor, 0, os.SEEK_HOLE) < size_bytes:
        raise BadFrame("the peer sent a file with holes: reading them would take memory, and there may be none")
    return memoryview(read_only(descriptor, size_bytes))
