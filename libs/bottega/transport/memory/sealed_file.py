"""Files that a message may carry between processes of one host: memory without a name that both ends read.

Only fully sealed memory is accepted: no process that has it, its sender included, can write, shorten or punch it any
more. So what was checked once stays as it was checked, without a copy, and reading it never faults; the reader of a
plain file ends by SIGBUS when somebody shortens the file.
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
    """A file to send. Its maker closes the descriptor, at any time: what was sent stays with the receiver."""

    descriptor: int
    size_bytes: int


def new_file(name: str) -> int:
    """An empty one, to be written and then sealed; its descriptor, which the caller closes. name: for those who look
    at a process from outside. Raises OSError."""
    return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def reserve(descriptor: int, size_bytes: int) -> None:
    """Takes all of its memory, so that writing it, which is to be done to the last byte, never comes to an end halfway.
    Raises OSError."""
    if size_bytes:
        os.posix_fallocate(descriptor, 0, size_bytes)


def seal(descriptor: int) -> None:
    """From now on nobody can change it. Raises OSError while somebody has it mapped to write."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def received_file(descriptor: int, size_bytes: int) -> memoryview:
    """A file's bytes, to read, valid for as long as somebody refers to them; the caller closes the descriptor.

    Writing them ends the process, though Python and torch take them for writable.
    Raises BadFrame unless it is sealed, all there and as large as was said; NoSharedMemory.
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
    # Blocks are not counted: they may lie behind the end, and holes before it.
    if os.lseek(descriptor, 0, os.SEEK_HOLE) < size_bytes:
        raise BadFrame("the peer sent a file with holes: reading them would take memory, and there may be none")
    return memoryview(read_only(descriptor, size_bytes))
