"""Folders that survive a power cut. Functions raise OSError."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
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
