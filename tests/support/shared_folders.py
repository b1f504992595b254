"""Folders that one of the processes of a run of tests writes, for all of them to read, such as models."""

from __future__ import annotations

import atexit
import fcntl
import functools
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


@functools.cache
def root() -> Path:
    """Return where they are: a folder that goes with this process. Processes that are forked later share it."""
    folder = Path(tempfile.mkdtemp(prefix="bottega-test-folders-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def written_once(name: str, write: Callable[[Path], object]) -> Path:
    """Return the folder of that name, which the first process that asks for it writes. Nobody may change it.

    Args:
        write: Writes into an empty folder.
    """
    place = root() / name
    with (root() / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            part = root() / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
            part.mkdir()
            write(part)
            part.rename(place)
    return place
