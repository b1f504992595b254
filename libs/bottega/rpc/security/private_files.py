"""Reads and writes files with secrets. They are used only if no other user can have written or read them.

Under systemd they may come from LoadCredential. Then they are in $CREDENTIALS_DIRECTORY, which root or the service's
user owns.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from bottega.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
# The group may have permission to read systemd's credentials: an access list lets the service's user read them.
_BY_GROUP = stat.S_IRGRP
_CREDENTIALS = "CREDENTIALS_DIRECTORY"

FILES_OF_UNITS = "/run/credentials/"
"""Beginning of the paths of files that systemd gives to a unit (LoadCredential), and that exist while it runs."""

FileState = tuple[int, int, int, int]
"""A value that changes when a file changes."""


def check_private(path: Path, status: os.stat_result, *, group_may_read: bool = False) -> None:
    """Raise ConfigError if a user other than root and this process's own owns a file, or may read or write it.

    Args:
        group_may_read: Whether the group may read a file that root owns.
    """
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} belongs to another user: a service trusts only files of its own user and of root")
    is_credential = str(path.parent) == os.environ.get(_CREDENTIALS)
    by_group = _BY_GROUP if status.st_uid == 0 and (is_credential or group_may_read) else 0
    if status.st_mode & _OTHERS & ~by_group:
        mode = "640" if group_may_read and status.st_uid == 0 else "600"
        raise ConfigError(f"{path} can be read or written by other users: chmod {mode} {path}")


def read_private(path: Path) -> bytes:
    """Return the contents of a file that only its owner can use. Raises ConfigError."""
    with _readable(path), path.open("rb") as file:
        check_private(path, os.fstat(file.fileno()))
        return file.read()


def read_public(path: Path) -> bytes:
    """Return the contents of a file that others may read. Raises ConfigError."""
    with _readable(path):
        return path.read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class FileAccess:
    """Owner, group and mode of a file to write."""

    mode: int
    """Permission bits."""
    owner: int = -1
    """User ID; -1 is the user of this process."""
    group: int = -1
    """Group ID; -1 is the group of this process."""


PRIVATE = FileAccess(mode=0o600)
"""Only the owner may read or write the file."""
PUBLIC = FileAccess(mode=0o644)
"""Everybody may read the file."""


def write_file(path: Path, data: bytes, access: FileAccess = PRIVATE) -> None:
    """Write a file durably and atomically. Raises OSError."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        file = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as writer:
            if (access.owner, access.group) != (-1, -1):
                os.fchown(file, access.owner, access.group)
            os.fchmod(file, access.mode)
            writer.write(data)
            writer.flush()
            os.fsync(file)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def open_private(path: Path) -> TextIO:
    """Open a file for appending that only its owner may read, and create it if it is missing. Raises OSError."""
    return os.fdopen(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600), "a", encoding="utf-8")


def file_state(path: Path) -> FileState:
    """Return the current state of a file; zeros if it is missing."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0, 0, 0
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
