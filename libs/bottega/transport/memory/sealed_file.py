"""Files that a message may carry between processes of one host: anonymous memory that both ends read.

Only fully sealed memory is accepted: no process, not even the sender, can write, shorten or punch it any more. Its
content stays as it was checked, without a copy, and reading it never faults. The reader of a plain file gets SIGBUS if
somebody shortens the file.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass

from bottega.errors import BadFrame
from bottega.transport.memory.mappings import read_only

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFile:
    """A file to send. Its maker may close the descriptor at any time: a sent file stays with the receiver."""

    descriptor: int
    size_bytes: int


def new_file(name: str) -> int:
    """Create an empty file, and return its descriptor, which the caller closes. Raises OSError.

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
    """Seal the file: nobody can change it any more. Raises OSError while a writable mapping exists."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def received_file(descriptor: int, size_bytes: int) -> memoryview:
    """Return a file's read-only bytes, valid as long as something refers to them. The caller closes the descriptor.

    A write ends the process, although Python and torch treat the bytes as writable. Raises BadFrame unless the file is
    sealed, fully allocated and as large as announced; NoSharedMemory.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise BadFrame("the peer sent a file of a disk: somebody could shorten it while we read it") from None
    if seals & _SEALS != _SEALS:
        raise BadFrame("the peer sent a file that is not sealed: somebody could change it while we read it")
    found_bytes = os.fstat(descriptor).st_size
    if found_bytes != size_bytes:
        raise BadFrame(f"the peer announced a file of {size_bytes} bytes and sent one of {found_bytes}")
    # Blocks are not counted: they may lie after the end, with holes before it.
    if os.lseek(descriptor, 0, os.SEEK_HOLE) < size_bytes:
        raise BadFrame("the peer sent a file with holes: reading them would take memory, and there may be none")
    return memoryview(read_only(descriptor, size_bytes))
