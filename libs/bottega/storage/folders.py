"""Folders that are still there after a power cut. Knows nothing of what is in them. Raises OSError."""

from __future__ import annotations

import os
from pathlib import Path


def make(folder: Path) -> None:
    """Creates the folder, and those above it, for its owner alone, where there is none."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)


def sync(folder: Path) -> None:
    """Returns when the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
