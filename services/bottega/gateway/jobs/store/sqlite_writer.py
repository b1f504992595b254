"""The writer of the job store: it commits waiting operations in groups, and checks that the file still exists.

One thread has the connection that writes. While it waits for the disk, other operations wait and form the next group.

SQLite goes on writing to a file that another program deletes, replaces or truncates. Such commits are lost when the
process ends. So the writer checks before and after each commit that the path still leads to the file that is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bottega.gateway.jobs.store import sqlite_schema
from bottega.storage import SerialTask, SerialThread, TaskGroups, folders, sqlite_files

ResultT = TypeVar("ResultT")

# How a log begins, https://sqlite.org/fileformat2.html#walformat; the two differ in the last bit.
_LOG_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")

# A group of 256 small operations takes some milliseconds, about as long as an fsync.
_MAX_GROUP = 256
_MAX_GROUP_BYTES = 32 << 20
_MAX_WAITING = 4096

_log = logging.getLogger(__name__)


class GroupCommit:
    """A queue of write operations that run in order of arrival. An operation is durable when its future is done.

    Args:
        connect: Opens a connection without implicit transactions; called in the writer thread, again after a failure.
        typed: Converts an SQLite error to the error to raise; None if only a bug can cause it.
        on_commit: Called in the writer thread with the duration of each commit in seconds.
        check: Called in the writer thread before each group with False, and after its commit with True, before any
            caller gets its result. It raises if commits would be lost.
    """

    def __init__(
        self,
        connect: Callable[[], sqlite3.Connection],
        typed: Callable[[sqlite3.Error], Exception | None],
        on_commit: Callable[[float], None],
        check: Callable[[sqlite3.Connection, bool], None] = lambda connection, committed: None,
    ) -> None:
        self._connect = connect
        self._check = check
        self._typed = typed
        self._on_commit = on_commit
        self._thread = SerialThread(
            "job-writer",
            groups=TaskGroups(serve=self._serve, max_tasks=_MAX_GROUP, max_bytes=_MAX_GROUP_BYTES),
            max_waiting=_MAX_WAITING,
        )
        self._connection: sqlite3.Connection | None = None
        self._failing = False
        self.commits = 0

    @property
    def waiting(self) -> int:
        """Number of operations that wait for the next group."""
        return self._thread.waiting

    async def run(self, operation: Callable[[sqlite3.Connection], ResultT], *, size_bytes: int = 0) -> ResultT:
        """Run `operation` in the next group, and return its result once it is durable.

        If an operation raises, only that operation is undone. If the commit fails, the whole group fails with the typed
        error, and later operations are tried again. `operation` may be called twice: if another one of its group fails,
        the first call is undone.

        Args:
            operation: Executes SQL on the connection.
            size_bytes: Approximate number of bytes that it writes; 0 if they are few.
        """
        return await self._thread.run(lambda: operation(self._open()), size_bytes=size_bytes)

    async def close(self) -> None:
        """Run the waiting operations, then close the connection."""
        await self._thread.close()
        await asyncio.to_thread(self._close)

    def _serve(self, group: Sequence[SerialTask]) -> None:
        wanted = [work for work in group if work.wanted]
        if not wanted:
            return
        began = time.perf_counter()
        try:
            self._transact(wanted)
        except BaseException as error:  # noqa: BLE001 - it is raised where the operations are awaited
            self._fail(wanted, error)
            return
        self.commits += 1
        self._on_commit(time.perf_counter() - began)
        self._log_change(failing=False)

    def _transact(self, group: Sequence[SerialTask]) -> None:
        connection = self._open()
        self._check(connection, False)
        connection.execute("BEGIN IMMEDIATE")
        if not self._all_went_well(group):
            connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            for work in group:
                self._attempt(connection, work)
        connection.execute("COMMIT")
        self._check(connection, True)

    def _all_went_well(self, group: Sequence[SerialTask]) -> bool:
        """Run the operations up to the first one that fails by itself. Return whether none failed.

        Operations rarely fail. So they run without savepoints first, which would need two more statements for each
        operation, and with each statement this thread may wait for the interpreter lock.
        """
        try:
            for work in group:
                work.result = work.do()
        except Exception as error:  # noqa: BLE001 - it is raised again when the operation runs alone
            self._raise_for_all(error)
            return False
        return True

    def _attempt(self, connection: sqlite3.Connection, work: SerialTask) -> None:
        """Run an operation in a savepoint, so that its failure does not undo the others."""
        connection.execute("SAVEPOINT operation")
        try:
            work.result = work.do()
        except Exception as error:  # noqa: BLE001 - it is raised where the operation is awaited
            self._raise_for_all(error)
            connection.execute("ROLLBACK TO operation")
            work.error = error
        connection.execute("RELEASE operation")

    def _raise_for_all(self, error: Exception) -> None:
        """Raise an error of the disk or the file, so that all operations of the group fail with it."""
        if isinstance(error, sqlite3.Error) and self._typed(error) is not None:
            raise error

    def _fail(self, group: Sequence[SerialTask], error: BaseException) -> None:
        self._log_change(failing=True, error=error)
        self._close()
        for work in group:
            typed = self._typed(error) if isinstance(error, sqlite3.Error) else None
            if typed is not None:
                typed.__cause__ = error
            work.error = typed or error

    def _log_change(self, *, failing: bool, error: BaseException | None = None) -> None:
        """Log the first failure, and the first success after failures."""
        if failing and not self._failing:
            _log.error("the job store cannot be written", exc_info=error)
        elif self._failing and not failing:
            _log.info("the job store can be written again")
        self._failing = failing

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _close(self) -> None:
        """Close the connection, which rolls back its transaction. The next operation opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # the open transaction was not acknowledged
                connection.close()


class FileLoss(enum.Enum):
    """The ways in which the file of a writer can be lost."""

    MOVED = "deleted or replaced"
    """The path leads elsewhere, but the open file is still complete."""
    CUT = "truncated"
    """The contents of the open file are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    device: int
    inode: int
    size_bytes: int

    def is_same(self, other: _Seen) -> bool:
        return (self.device, self.inode) == (other.device, other.inode)


class FilePlace:
    """Checks that a database and its log are still the files that were opened. Call `remember` after opening."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._log_path = sqlite_files.log_of(path)
        self._file: _Seen | None = None
        self._log: _Seen | None = None

    def remember(self) -> None:
        """Remember the file's inode, and drop that of its log. Raises OSError if there is no file."""
        self._file = _seen(self._path.stat())
        self._log = None

    def forget_log(self) -> None:
        """Note that the log is gone: SQLite deletes it when the last connection closes."""
        self._log = None

    def loss(self, *, committed: bool = False, header: bool = True) -> FileLoss | None:
        """Return how the files were lost, or None if they are where they were.

        Args:
            committed: Whether a commit has just written to the log. Then the sizes of the files are remembered.
            header: Whether to read the header of the log. A log that was cut is shorter until something is written.
        """
        # Only `stat` is used for the file: opening and closing it would release this process's locks on it. And there
        # are few system calls: each releases the interpreter's lock, for which this thread then waits.
        if self._file is None:
            return None
        file, log = _stat(self._path), _stat(self._log_path)
        if file is None or not file.is_same(self._file):
            return FileLoss.MOVED
        if file.size_bytes < self._file.size_bytes:
            return FileLoss.CUT
        if log is None and (committed or self._log is not None):
            return FileLoss.MOVED
        if log is not None and self._log is not None:
            if not log.is_same(self._log):
                return FileLoss.MOVED
            # When the log begins anew, its file keeps at most this size.
            shorter = log.size_bytes < min(self._log.size_bytes, sqlite_schema.LOG_BYTES)
            if shorter or (header and not self._has_header(log)):
                return FileLoss.CUT
        if committed:
            self._file, self._log = file, log
        return None

    def put_back(self, connection: sqlite3.Connection) -> bool:
        """Restore the file from the content that an open connection reads. Return False if some of it cannot be read.

        If another file has taken the path, it is renamed. Raises OSError and sqlite3.Error if nothing can be written.
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
        """Create a new file. If the old file is complete without its log, keep it and drop the log. Raises OSError."""
        self._put_aside(log_only=self._is_whole_alone())
        sqlite_files.create_file(self._path)
        self.remember()

    def _has_header(self, log: _Seen) -> bool:
        """Return whether the log still has its header: a truncated log has zeros up to the next write."""
        if not log.size_bytes:
            return True
        try:
            descriptor = os.open(self._log_path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(descriptor, 4) in _LOG_MAGIC
            finally:
                os.close(descriptor)
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
        """Rename the files at the paths of database and log, and delete empty ones."""
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
