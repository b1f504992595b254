"""Folders that survive a power cut, and paths that callers choose below a folder that an operator allows.

Such a path is checked after links are resolved, before it is used, for a clear refusal. `open_below` checks the opened
file, so that a link that replaces the file after the check is noticed. A path that leads out of the root raises OSError
with EXDEV, as with Linux's openat2. Functions raise OSError.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
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
    except RuntimeError:  # raised by Path.resolve
        raise OSError(errno.ELOOP, "its links lead in circles") from None
    if not resolved.is_relative_to(root):
        raise _outside(root)
    return resolved


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
