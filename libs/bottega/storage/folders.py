"""Folders that are still there after a power cut. Raises OSError."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from bottega.state_folder import make_private, owner_of

_log = logging.getLogger(__name__)


def make(folder: Path) -> None:
    """Creates the folder, and those above it, for its owner alone, where there is none."""
    if not folder.is_dir():
        make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        sync(folder.parent)


def make_own(folder: Path) -> None:
    """The same for a folder that is nobody else's: where others may look into one that is there, they no longer may.

    What keeps it from that, such as another owner or a disk that cannot be written, is logged: what is there can be
    read all the same.
    """
    make(folder)
    with contextlib.suppress(OSError):
        make_private(folder)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        facts = {"folder": str(folder), "mode": f"{mode:o}", "owner": owner_of(folder)}
        _log.warning("other users may look into the folder", extra=facts)


def sync(folder: Path) -> None:
    """Returns when the names in the folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
