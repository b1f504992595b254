"""The place of the job store's file: whether the open file still has its name, and how it is restored.

SQLite goes on writing to a file that was deleted or replaced, and over one that was truncated; what it commits then is
lost when the process ends. So the writer checks the place before and after each commit.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

from bottega.gateway.jobs.store import sqlite_schema
from bottega.storage import folders, sqlite_files

# How a log begins, https://sqlite.org/fileformat2.html#walformat; the two differ in the last bit.
_LOG_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")


class FileLoss(enum.Enum):
    """The kinds of losses of a writer's file."""

    MOVED = "deleted or replaced"
    """The open file is still complete."""
    CUT = "truncated"
    """The contents are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    device: int
    inode: int
    size_bytes: int

    def is_same(self, other: _Seen) -> bool:
        return (self.device, self.inode) == (other.device, other.inode)


class FilePlace:
    """The place of a database and of its log. `remember` it when the file is opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log_path = sqlite_files.log_of(path)
        self._file: _Seen | None = None
        self._log: _Seen | None = None

    def remember(self) -> None:
        """Remember which file has the name now, and that its log is unknown. Raises OSError if there is no file."""
        self._file = _seen(self._path.stat())
        self._log = None

    def forget_log(self) -> None:
        """Forget the log, which may be another one from now on: SQLite deletes it with its last connection."""
        self._log = None

    def follow(self) -> None:
        """Remember the sizes of both, after a commit has found them in place. Raises OSError."""
        self._file = _seen(self._path.stat())
        self._log = _seen(self._log_path.stat())

    def loss(self, *, committed: bool = False) -> FileLoss | None:
        """Return how the files were lost, or None if they are in place.

        Args:
            committed: Whether the connection has written to the log.
        """
        # The file is not opened here: closing it would release this process's locks on it.
        if self._file is None:
            return None
        file, log = _stat(self._path), _stat(self._log_path)
        if file is None or not file.is_same(self._file):
            return FileLoss.MOVED
        if file.size_bytes < self._file.size_bytes:
            return FileLoss.CUT
        if self._log is None:
            return FileLoss.MOVED if committed and log is None else None
        if log is None or not log.is_same(self._log):
            return FileLoss.MOVED
        # When the log begins anew, its file keeps at most this size.
        shorter = log.size_bytes < min(self._log.size_bytes, sqlite_schema.LOG_BYTES)
        return FileLoss.CUT if shorter or not self._has_header(log) else None

    def put_back(self, connection: sqlite3.Connection) -> bool:
        """Restore the file from the content that an open connection reads. Return False if it cannot read all.

        Another file that has the name now is renamed. Raises OSError and sqlite3.Error if nothing can be written.
        """
        copy = self._path.with_name(f"{self._path.name}-copy")
        if not sqlite_files.copy_whole(connection, copy, self._is_whole):
            return False
        self._put_aside()
        copy.rename(self._path)
        folders.sync(self._path.parent)
        self.remember()
        return True

    def begin_anew(self) -> None:
        """Create a new file, or use the old one without its log if that is whole. Raises OSError."""
        self._put_aside(log_only=self._is_whole_alone())
        sqlite_files.create_file(self._path)
        self.remember()

    def _has_header(self, log: _Seen) -> bool:
        """Return whether the log has its header: a truncated log is zeros up to what was written since."""
        if not log.size_bytes:
            return True
        try:
            with self._log_path.open("rb") as file:
                return file.read(4) in _LOG_MAGIC
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            return True  # without a free descriptor it cannot be read now; the next check reads it

    def _is_whole_alone(self) -> bool:
        if not self._path.exists() or not self._path.stat().st_size:
            return False
        try:
            with contextlib.closing(sqlite_files.connect_without_log(self._path)) as connection:
                return self._is_whole(connection)
        except sqlite3.Error:
            return False

    def _is_whole(self, connection: sqlite3.Connection) -> bool:
        return sqlite_schema.has_tables(connection, self._path) and sqlite_schema.is_sound(connection, made=True)

    def _put_aside(self, *, log_only: bool = False) -> None:
        """Rename the files that have the names, and delete empty ones."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        for end in ("-wal", "-shm", *([] if log_only else [""])):
            part = self._path.with_name(self._path.name + end)
            if not part.exists():
                continue
            if part.stat().st_size:
                part.rename(part.with_name(f"{self._path.stem}.aside-{stamp}{self._path.suffix}{end}"))
            else:
                part.unlink()
        if self._path.parent.is_dir():
            folders.sync(self._path.parent)


def _seen(status: os.stat_result) -> _Seen:
    return _Seen(device=status.st_dev, inode=status.st_ino, size_bytes=status.st_size)


def _stat(path: Path) -> _Seen | None:
    try:
        return _seen(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None
