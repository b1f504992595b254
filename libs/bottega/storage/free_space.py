"""The free space of a disk, and the part of it that stores leave to other programs."""

from __future__ import annotations

import os
from pathlib import Path

from bottega.storage import os_errors

# On a disk so small that `min_free_bytes` would be most of it, this share stays free instead.
_FREE_SHARE = 0.05


def measure(folder: Path, *, min_free_bytes: int) -> tuple[int, int]:
    """Return the free bytes of the folder's disk, and how many of them to leave. Raise StorageUnavailable.

    Args:
        min_free_bytes: Bytes to leave to other programs. A value above 5 % of the disk counts as 5 %.
    """
    with os_errors.translated():
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
        raise os_errors.unavailable(what, cause="ENOSPC")
