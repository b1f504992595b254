"""What is free of a disk, and what stores leave of that to others."""

from __future__ import annotations

import os
from pathlib import Path

from bottega.storage import os_errors

# On a disk so small that `min_free_bytes` would be most of it, this share of it stays free.
_FREE_SHARE = 0.05


def measure(folder: Path, *, min_free_bytes: int) -> tuple[int, int]:
    """Bytes that are free on the folder's disk, and those of them that stay free. Raises StorageUnavailable.

    min_free_bytes: that stay free; of a small disk a twentieth.
    """
    with os_errors.translated():
        disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize, min(min_free_bytes, int(disk.f_blocks * disk.f_frsize * _FREE_SHARE))


def lack(folder: Path, size_bytes: int, *, min_free_bytes: int) -> int:
    """Bytes that have to go before so many more leave others what they should have. Raises StorageUnavailable."""
    free_bytes, kept_bytes = measure(folder, min_free_bytes=min_free_bytes)
    return max(0, size_bytes + kept_bytes - free_bytes)


def check(folder: Path, size_bytes: int, *, min_free_bytes: int) -> None:
    """Raises StorageUnavailable where so much more would leave others less of the disk than it should.

    Where nothing is to stay free, the system itself says when the disk is full.
    """
    if not min_free_bytes:
        return
    free_bytes, kept_bytes = measure(folder, min_free_bytes=min_free_bytes)
    if free_bytes - size_bytes < kept_bytes:
        what = f"the disk is full: {free_bytes} bytes are free, and {kept_bytes} stay free (min_free_bytes)"
        raise os_errors.unavailable(what, cause="ENOSPC")
