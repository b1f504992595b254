"""Folders that survive a power cut, locks, and paths that callers choose below a folder that an operator allows.

Such a path is checked after links are resolved, before it is used, for a clear refusal. `open_below` checks the opened
file, so that a link that replaces the file after the check is noticed. A path that leads out of the root raises OSError
with EXDEV, as with Linux's openat2. Functions raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from bottega.state_folder import make_private, owner_of

_log = logging.getLogger(__name__)


def make(folder: Path) -> None:
    """Create the folder and its parents, private to the user, if they do not exist."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)


def make_own(folder: Path) -> None:
    """Create the folder as `make` does. If it exists already, make it private to the user.

    If that is impossible, because of another owner or a read-only disk, it is logged, and the folder is used anyway.
    """
    make(folder)
    with contextlib.suppress(OSError):
        make_private(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        facts = {"folder": str(folder), "mode": f"{mode:o}", "owner": owner_of(folder)}
        _log.warning("other users may be able to read the folder", extra=facts)


def sync(folder: Path) -> None:
    """Wait until the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def resolved_below(path: Path, root: Path) -> Path:
    """Return a path, which may be relative to the root, with its links resolved.

    Raises OSError if it is outside of the root or cannot be resolved.

    Args:
        root: A resolved path.
    """
    try:
        resolved = (root / path).resolve()
        in_circles = _is_in_circles(resolved)
    except RuntimeError:  # raised by Path.resolve before Python 3.13
        in_circles = True
    if in_circles:
        raise OSError(errno.ELOOP, "its links lead in circles")
    if not resolved.is_relative_to(root):
        raise _outside(root)
    return resolved


def _is_in_circles(path: Path) -> bool:
    try:
        path.stat()
    except OSError as error:
        return error.errno == errno.ELOOP
    return False


def check_below(files: Iterable[Path], root: Path) -> None:
    """Raise OSError if a file is outside of the root; its `filename` is the name of the first such file."""
    for file in files:
        try:
            resolved_below(file, root)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from None


def listed(folder: Path, suffix: str, *, most: int, deep: bool) -> Iterator[Path]:
    """Yield the files in a folder whose names end with `suffix`.

    Args:
        most: Maximum number of entries of any kind; more raise OSError.
        deep: Whether to search subfolders as well, except those that are links.
    """
    folders, seen = [folder], 0
    while folders:
        place = folders.pop()
        with os.scandir(place) as found:
            for entry in found:
                seen += 1
                if seen > most:
                    raise OSError(errno.E2BIG, f"has over {most} files", folder.name)
                if entry.is_dir(follow_symlinks=False):
                    folders += [place / entry.name] if deep else []
                elif entry.name.endswith(suffix):
                    yield place / entry.name


def open_below(path: Path, root: Path | None) -> BufferedReader:
    """Open a regular file for reading, which must be below the root after links are resolved.

    Raises OSError, also if it is not a regular file: opening a device or pipe could hang or have side effects.

    Args:
        root: The allowed folder; None allows any place.
    """
    # O_PATH finds the file without opening it. The descriptor is then opened, so the checked file is the opened one.
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(found).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", path.name)
        itself = Path(f"/proc/self/fd/{found}")
        if root is not None and not itself.readlink().is_relative_to(root):
            raise OSError(errno.EXDEV, _outside(root).strerror, path.name)
        return itself.open("rb")
    finally:
        os.close(found)


def _outside(root: Path) -> OSError:
    return OSError(errno.EXDEV, f"must be below {root}, after links are resolved")


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
    """A lock on a folder or a file for one process at a time, which also tells which process holds it.

    The system releases the lock of a process that dies. Two locks in one process exclude each other as well.

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
