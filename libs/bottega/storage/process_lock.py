"""A lock on a folder or a file for one process at a time, which also tells which process holds it.

The system releases the lock of a process that dies, so that no stale lock remains.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

_PROCESSES = Path("/proc")


class HeldElsewhere(BlockingIOError):
    """The error that another process holds a lock. Its text is a sentence for an operator."""

    def __init__(self, path: Path, pid: int | None, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.path = path
        self.pid = pid
        """PID of the process that holds the lock; None if it is unknown."""

    def __str__(self) -> str:
        who = "another process" if self.pid is None else f"process {self.pid}"
        return f"{self.path} is in use by {who}: stop that one first, or configure another place"


class ProcessLock:
    """A lock. Two locks in one process exclude each other as well.

    Args:
        path: An existing folder, or a file, which is created if it does not exist and is never replaced.
        of: What the lock protects, for the text of the error; the path by default.
    """

    def __init__(self, path: Path, *, of: Path | None = None) -> None:
        self._path = path
        self._of = of or path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Acquire the lock without waiting. Do nothing if it is held already. Raise HeldElsewhere or OSError."""
        if self._descriptor is not None:
            return
        made = 0 if self._path.is_dir() else os.O_CREAT
        descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | made, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = _holder(descriptor)
            os.close(descriptor)
            raise HeldElsewhere(self._of, pid, error) from None
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    @property
    def in_place(self) -> bool:
        """Whether the lock is held, and its folder or file was not replaced since then."""
        if self._descriptor is None:
            return False
        held = os.fstat(self._descriptor)
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        """Release the lock. Do nothing if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _holder(descriptor: int) -> int | None:
    """Return the PID of the process that holds the lock of this file; None if this user cannot see it.

    The system lists the locks of each descriptor, see proc_pid_fdinfo(5).
    """
    wanted = os.fstat(descriptor)
    lock = re.compile(rf"^lock:.*\bFLOCK\b.*:{wanted.st_ino}\s", re.MULTILINE)
    for info in _PROCESSES.glob("[0-9]*/fdinfo/[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if lock.search(info.read_text(encoding="ascii", errors="replace")):
                process = info.parent.parent
                found = (process / "fd" / info.name).stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return int(process.name)
    return None
