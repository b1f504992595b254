"""The folders in which services, the command and trainings keep state, their permissions, and atomic writes.

On a machine with systemd units, an operator's tenants and certificates are beside the units' configurations. State
contains prompts and pictures, so only their owner can read folders and files. Imports little, so that commands start
fast.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STATE_VARIABLE = "BOTTEGA_STATE"
CONFIG_VARIABLE = "BOTTEGA_CONFIG"
"""Environment variable with the folder of the units' configurations, if it is not UNITS_CONFIG_FOLDER."""
UNITS_CONFIG_FOLDER = "/etc/bottega"

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def state_folder() -> Path:
    """Return $BOTTEGA_STATE if it is set, else the folder bottega in $XDG_STATE_HOME or ~/.local/state."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "bottega"


def service_state() -> Path:
    """Return the state folder of this service: the one that systemd made for its unit, else `state_folder()`."""
    return Path(os.environ.get("STATE_DIRECTORY") or state_folder())


def operator_folder() -> Path:
    """Return the default folder of tenants and certificates.

    It is the folder of the units' configurations if this user may write there, else the state folder.
    """
    folder = Path(os.environ.get(CONFIG_VARIABLE) or UNITS_CONFIG_FOLDER)
    return folder if folder.is_dir() and os.access(folder, os.W_OK) else state_folder()


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, private to the user. Make an existing folder of this user private, too.

    A folder with the sticky bit, such as /tmp, is shared and stays as it is. Raises OSError.
    """
    if not folder.is_dir():
        make_missing(folder)
    status = folder.stat()
    if status.st_mode & _OTHERS and status.st_uid == os.geteuid() and not status.st_mode & stat.S_ISVTX:
        folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)


def make_missing(folder: Path) -> None:
    """Create a folder and its missing parents, private to the user, if it does not exist. Raise OSError."""
    if not folder.is_dir():
        make_missing(folder.parent)
        folder.mkdir(mode=stat.S_IRWXU, exist_ok=True)


def owner_of(path: Path) -> str:
    """Return the name of the user that owns a path, or its nearest visible parent; empty if it is unknown."""
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
    """Make this process and its children create files that only their owner can read. Return the old umask."""
    return os.umask(_OTHERS)


@contextmanager
def private_files() -> Iterator[None]:
    """Create files that only their owner can read, in the `with` block."""
    before = keep_files_private()
    try:
        yield
    finally:
        os.umask(before)


def write_whole(target: Path, data: bytes) -> None:
    """Replace a file atomically, so that readers see either the old or the new content."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
