"""The memory of slots: private slots of this process, and sealed slots that two processes share.

A mapping is never closed, only dropped: closing it under a tensor that still uses it would crash the process. The
system unmaps it when nothing refers to it any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from bottega.errors import BadFrame, NoSharedMemory
from bottega.process import open_files

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


def private_slot(size_bytes: int) -> mmap.mmap:
    """Return page-aligned memory of this process with all pages allocated. Raises NoSharedMemory."""
    with _no_memory(size_bytes):
        return mmap.mmap(-1, _pages(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)


def shared_slot(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Return memory to write and share: the file descriptor for the peer, which the caller closes, and our mapping.

    Every page is reserved first, so a system without room raises NoSharedMemory here, instead of SIGBUS later.
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
    """Share one page as a test; return why sharing does not work, or ""."""
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
        raise BadFrame("the peer sent a file that is no shared memory") from None
    status = os.fstat(descriptor)
    if seals & _SEALS != _SEALS:
        raise BadFrame("the peer sent memory that is not sealed: it could be taken away while we read it")
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
