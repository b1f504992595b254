"""The folders of links' unix sockets, and the check that no other user controls them.

A folder is opened first and the open descriptor is checked, so that nobody can swap the folder in between.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from bottega.errors import ConfigError
from bottega.transport.handshake.credentials import user_name

# systemd makes the first folder for a unit's sockets, and other units can see it. The second is for all of a user's
# processes.
_UNIT_VARIABLE = "RUNTIME_DIRECTORY"
_USER_VARIABLE = "XDG_RUNTIME_DIR"
_ROOT = 0
_WRITERS = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_ELSEWHERE = "or give links a socket in another folder (links.socket in its configuration)"


def default_socket_path(service: str) -> Path:
    """Return a path for a unix socket of this process.

    It is in the folder that systemd made for the unit, else in a private folder of this user, which is created if
    needed in the user's runtime folder or in the one for temporary files. Raises ConfigError if the folder belongs to
    another user or is open to others.
    """
    if given := os.environ.get(_UNIT_VARIABLE, "").partition(":")[0]:
        _check_folder(Path(given), private=False)
        return Path(given) / "links.sock"
    folder = _of_this_user()
    with suppress(OSError):  # the check below reports the problem
        folder.mkdir(mode=0o700)
    _check_folder(folder, private=True)
    return folder / f"{service}-{os.getpid()}.sock"


def open_folder(folder: Path, *, private: bool = False) -> int:
    """Return a descriptor of a folder in which only this user and root can create or replace anything.

    Raises ConfigError that names the owner and what to do, and OSError if there is no such folder.

    Args:
        private: Also require that the folder is this user's and that no other user can read it.
    """
    _refuse_links(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(folder, os.fstat(descriptor), private=private)
    except ConfigError:
        os.close(descriptor)
        raise
    return descriptor


def _check_folder(folder: Path, *, private: bool) -> None:
    try:
        os.close(open_folder(folder, private=private))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be used for sockets of links: {error.strerror or error}") from None


def _of_this_user() -> Path:
    runtime = os.environ.get(_USER_VARIABLE, "")
    if runtime and Path(runtime).is_absolute():
        with suppress(OSError, ConfigError):  # a folder of another user's session, as after sudo, is not meant
            os.close(open_folder(Path(runtime), private=True))
            return Path(runtime) / "bottega"
    return Path(tempfile.gettempdir()) / f"bottega-{os.geteuid()}"


def _refuse_links(folder: Path) -> None:
    """Raise a clear error for a symbolic link or a file; opening it would fail with the same words for both."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise ConfigError(
            f"{folder} is {what}, made by {user_name(found.st_uid)}: sockets of links lie in a real folder; "
            f"remove it, {_ELSEWHERE}"
        )


def _check(folder: Path, found: os.stat_result, *, private: bool) -> None:
    user = os.geteuid()
    if found.st_uid != user and (private or found.st_uid != _ROOT):
        raise ConfigError(
            f"{folder} belongs to {user_name(found.st_uid)}, and not to {user_name(user)}, who runs this: its owner "
            f"could take links over; have it removed, {_ELSEWHERE}"
        )
    open_to = stat.S_IMODE(found.st_mode) & (_OTHERS if private else _WRITERS)
    if open_to:
        rights = stat.S_IMODE(found.st_mode)
        what = "open to others" if private else "writable for others"
        raise ConfigError(
            f"{folder} is {what} (its mode is {rights:04o}), who could take links over: look who uses it, then "
            f"chmod {rights & ~open_to:04o} {folder}, {_ELSEWHERE}"
        )
