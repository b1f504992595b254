"""Where Bottega keeps what outlives its processes: services, the command and the trainings all look there.

What an operator writes for the units of a machine, its tenants and certificates, is beside their configurations.

Prompts and pictures are nobody else's: folders are made for their owner alone, and files in them too. Light, so that a
command that only lists something need not read what configuration needs.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATE_VARIABLE = "BOTTEGA_STATE"
CONFIG_VARIABLE = "BOTTEGA_CONFIG"
"""Names the folder of the units' configurations, where that is not UNITS_CONFIG_FOLDER."""
UNITS_CONFIG_FOLDER = "/etc/bottega"

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def state_folder() -> Path:
    """$BOTTEGA_STATE, else bottega in $XDG_STATE_HOME or ~/.local/state."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "bottega"


def operator_folder() -> Path:
    """Return where tenants and certificates are unless somebody says otherwise.

    It is the folder of the units' configurations where this user may write there, else the state folder.
    """
    folder = Path(os.environ.get(CONFIG_VARIABLE) or UNITS_CONFIG_FOLDER)
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else state_folder()


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for its owner alone; one that is there and ours becomes so.

    One with the sticky bit is everybody's, such as /tmp, and stays as it is. Raises OSError.
    """
    if not folder.is_dir():
        make_missing(folder)
    status = folder.stat()
    if status.st_mode & _OTHERS and status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)


def make_missing(folder: Path) -> None:
    """Makes a folder, and those above it that are missing, for its owner alone. Raises OSError."""
    if not folder.is_dir():
        make_missing(folder.parent)
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)


def owner_of(path: Path) -> str:
    """Who owns it, or the nearest above it that can be seen, by name; empty where nobody can say."""
    import pwd

    for place in (path, *path.absolute().parents):
        try:
            uid = place.stat().st_uid
        except OSError:
            continue
        try:
            return pwd.getpwuid(uid).pw_name
        except KeyError:
            return f"user {uid}"
    return ""


def keep_files_private() -> int:
    """From now on this process, and those that it starts, make files for their owner alone. Returns the old umask."""
    return os.umask(_OTHERS)


@contextmanager
def private_files() -> Iterator[None]:
    """The same while the context lasts."""
    before = keep_files_private()
    try:
        yield
    finally:
        os.umask(before)
