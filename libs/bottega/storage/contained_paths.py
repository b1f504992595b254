"""Files that callers name, and that may only lie below a folder that an operator allows, links followed.

A path is checked before it is used, for a clear refusal; a file is opened by `open_below`, which checks what it has
opened, so that nobody can put a link in its place between the two. Raises OSError
with EXDEV for what leads out of the root, as Linux's openat2 does.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path


def resolved_below(path: Path, root: Path) -> Path:
    """The path, absolute or relative to the root, with its links followed. root: itself resolved. Raises OSError."""
    try:
        resolved = (root / path).resolve()
    except RuntimeError:  # Path.resolve's word for it
        raise OSError(errno.ELOOP, "its links lead in circles") from None
    if not resolved.is_relative_to(root):
        raise _outside(root)
    return resolved


def check_below(files: Iterable[Path], root: Path) -> None:
    """Raises OSError whose `filename` is that of the first file that leads out of the root."""
    for file in files:
        try:
            resolved_below(file, root)
        except OSError as error:
            raise OSError(error.errno, error.strerror, file.name) from None


def listed(folder: Path, suffix: str, *, most: int, deep: bool) -> Iterator[Path]:
    """Files of a folder by the end of their names; deep: also those in folders in it, but not in those that are links.

    most: entries of any kind that are looked at; where there are more it raises OSError.
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
    """Opens a regular file to be read, wherever its links lead below the root; without a root, anywhere.

    Raises OSError, also for what is no regular file: opening that could hang, or do something.
    """
    # O_PATH finds the file and opens nothing; what is opened then is what was found and looked at.
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
    return OSError(errno.EXDEV, f"must be below {root}, links followed")
