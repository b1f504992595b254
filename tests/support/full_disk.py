"""Disks that are full or cannot be written, for tests, as any user or as root."""

from __future__ import annotations

import contextlib
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def files_at_most(size_bytes: int) -> Iterator[None]:
    """In the block, this process can write no file beyond `size_bytes`: the system says EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(folder: Path, *, size_bytes: int) -> Iterator[Path]:
    """A file system of its own under `folder`; skips the test where none can be mounted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "bottega-test", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, timeout=20, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], timeout=20, check=True)


@contextlib.contextmanager
def read_only(disk: Path) -> Iterator[None]:
    """In the block, nothing of `small_disk` can be written: the system says EROFS."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True, timeout=20, check=True)
    try:
        yield
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], capture_output=True, timeout=20, check=True)


def fill(disk: Path) -> Path:
    """Uses up all space of `small_disk`; returns the file to remove to have it back."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast
