"""A lock on a folder or a file that one process at a time has, and which process that is. Reads nothing of it.

It is the system's: whoever dies lets it go, and nobody has to clear it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

_PROCESSES = Path("/proc")


class HeldElsewhere(BlockingIOError):
    """Another process has it. str() is a sentence for an operator; pid: of that process, None where nothing tells."""

    def __init__(self, path: Path, pid: int | None, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.path = path
        self.pid = pid

    def __str__(self) -> str:
        who = "another process" if self.pid is None else f"process {self.pid}"
        return f"{self.path} is in use by {who}: stop that one first, or configure another place"


class ProcessLock:
    """path: of a folder that is there, or of a file, which is made where there is none and is never replaced.

    of: what the lock is for, and what a refusal names; by default the path itself. Two locks of one process exclude
    each other as well.
    """

    def __init__(self, path: Path, *, of: Path | None = None) -> None:
        self._path = path
        self._of = of or path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Returns at once. Harmless where this process has it. Raises HeldElsewhere, OSError."""
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
        """Whether this process has the lock of what is at the path now, and not of what was there before."""
        if self._descriptor is None:
            return False
        held = os.fstat(self._descriptor)
        try:
            found = self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)

    def release(self) -> None:
        """Lets another process have it. Does nothing if this process does not hold it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _holder(descriptor: int) -> int | None:
    """The process that has the lock of this file, as far as this user may know: the system tells of each descriptor
    which locks it has (proc_pid_fdinfo(5))."""
    wanted = os.fstat(descriptor)
    lock = re.compile(rf"^lock:.*\bFLOCK\b.*:{wanted.st_ino}\s", re.MULTILINE)
    for told in _PROCESSES.glob("[0-9]*/fdinfo/[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if lock.search(told.read_text(encoding="ascii", errors="replace")):
                process = told.parent.parent
                found = (process / "fd" / told.name).stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return int(process.name)
    return None
