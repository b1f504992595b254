"""Files that hold secrets: believed only where no other user can have written or read them.

Under systemd they may come by LoadCredential: then they are in $CREDENTIALS_DIRECTORY, which is root's or the service's
own.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bottega.errors import ConfigError

# Of systemd's credentials the group's bits may say "read": an access list lets the service's user read them.
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_OF_CREDENTIALS = stat.S_IRGRP
_CREDENTIALS = "CREDENTIALS_DIRECTORY"

FileState = tuple[int, int, int, int]
"""Changes when a file does."""


def check_private(path: Path, status: os.stat_result) -> None:
    """Raises ConfigError where others than root and this process's user may read or write a file, or own it."""
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} is another user's: a service believes no one but its own user and root")
    is_credential = status.st_uid == 0 and str(path.parent) == os.environ.get(_CREDENTIALS)
    if status.st_mode & _OTHERS & ~(_OF_CREDENTIALS if is_credential else 0):
        raise ConfigError(f"{path} can be read or written by others than its owner: chmod 600 {path}")


def read_private(path: Path) -> bytes:
    """What is in a file that only its owner can use. Raises ConfigError."""
    with _readable(path), path.open("rb") as file:
        check_private(path, os.fstat(file.fileno()))
        return file.read()


def read_public(path: Path) -> bytes:
    """What is in a file that others may read. Raises ConfigError."""
    with _readable(path):
        return path.read_bytes()


def write_file(path: Path, data: bytes, *, private: bool) -> None:
    """Durably, and whole or not at all. private: only its owner may read it. Raises OSError."""
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        file = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(file, "wb") as writer:
            if not private:
                os.fchmod(file, 0o644)
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
    """A file to add to, that only its owner may read; made where it is missing. Raises OSError."""
    return os.fdopen(os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o600), "a", encoding="utf-8")


def file_state(path: Path) -> FileState:
    """Of a file as it is now; zeros while it is not there."""
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
