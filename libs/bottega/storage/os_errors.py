"""Errors of disks as StorageUnavailable, without paths, and the free space that stores leave to other programs."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from bottega.errors import StorageUnavailable
from bottega.process import open_files

# Long enough for an operator or a sweep to make room, and short enough to notice it soon.
RETRY_AFTER_S = 5.0
# Cause of a refusal that is not a fault of the disk: too many operations wait for it.
BUSY = "EAGAIN"
# Cause of a refusal before `open` has succeeded, or after `close`.
NOT_OPEN = "EBADF"

# Errors of a place that cannot be written, such as a disk that was mounted read-only.
FORBIDDEN = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# Causes of a full disk, an exhausted quota, and SQLite's error for both.
_LACK_OF_ROOM = frozenset({"ENOSPC", "EDQUOT", "SQLITE_FULL"})


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Convert every OSError in the `with` block to StorageUnavailable, with the OSError as its cause.

    Unexpected ones are included, because after them, too, the work was not done and may be retried. Too many open files
    become TooManyOpenFiles, a StorageUnavailable that does not blame the disk.
    """
    try:
        yield
    except OSError as error:
        if open_files.is_cause(error):
            raise open_files.too_many(error) from error
        raise unavailable(_text(error.errno), cause=errno.errorcode.get(error.errno or 0, "EIO")) from error


def unavailable(what: str, *, cause: str) -> StorageUnavailable:
    """Return a StorageUnavailable.

    Args:
        what: What happened, for people, such as "the disk is full".
        cause: The system's name of the error, such as ENOSPC.
    """
    return StorageUnavailable(what, metadata={"cause": cause}, retry_after_s=RETRY_AFTER_S)


def is_lack_of_room(error: StorageUnavailable) -> bool:
    """Return whether the error is a lack of free space."""
    return error.metadata.get("cause") in _LACK_OF_ROOM


def _text(number: int | None) -> str:
    if number in _FULL:
        return "the disk is full"
    if number in FORBIDDEN:
        return "the disk cannot be written"
    if number == errno.EWOULDBLOCK:
        return "another process uses the storage"
    return "the disk has failed"


# On a disk so small that `min_free_bytes` would be most of it, this share stays free instead.
_FREE_SHARE = 0.05


def measure(folder: Path, *, min_free_bytes: int) -> tuple[int, int]:
    """Return the free bytes of the folder's disk, and how many of them to leave. Raise StorageUnavailable.

    Args:
        min_free_bytes: Bytes to leave to other programs. A value above 5 % of the disk counts as 5 %.
    """
    with translated():
        disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize, min(min_free_bytes, int(disk.f_blocks * disk.f_frsize * _FREE_SHARE))


def lack(folder: Path, size_bytes: int, *, min_free_bytes: int) -> int:
    """Return how many bytes must be freed before `size_bytes` more may be written. Raise StorageUnavailable."""
    free_bytes, kept_bytes = measure(folder, min_free_bytes=min_free_bytes)
    return max(0, size_bytes + kept_bytes - free_bytes)


def check(folder: Path, size_bytes: int, *, min_free_bytes: int) -> None:
    """Raise StorageUnavailable if writing `size_bytes` would leave less than `min_free_bytes` to other programs.

    Do nothing if `min_free_bytes` is 0: then the system reports a full disk.
    """
    if not min_free_bytes:
        return
    free_bytes, kept_bytes = measure(folder, min_free_bytes=min_free_bytes)
    if free_bytes - size_bytes < kept_bytes:
        what = f"the disk is full: {free_bytes} bytes are free, and {kept_bytes} stay free (min_free_bytes)"
        raise unavailable(what, cause="ENOSPC")
