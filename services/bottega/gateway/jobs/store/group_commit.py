"""Many operations, one commit: what waits goes into one transaction, so that all of it shares the wait for the disk.

One thread has the connection that writes. While it waits for the disk, others queue up and form the next group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from bottega.storage import StorageTask, StorageThread

ResultT = TypeVar("ResultT")

# A group of 256 small operations takes some milliseconds, about what an fsync takes.
_MAX_GROUP = 256
_MAX_GROUP_BYTES = 32 << 20
_MAX_WAITING = 4096

_log = logging.getLogger(__name__)


class GroupCommit:
    """Runs operations in the order in which they came; each is durable when its future is done.

    connect: opens a connection without implicit transactions; called in the thread, and again after a failure.
    typed: what to raise for an error of SQLite, or None for one that is a fault of ours.
    on_commit: called in the thread with the seconds that each group took.
    check: called in the thread before each group and after its commit, before anybody hears of that; whether it was
        committed. It raises where what is committed would not last.
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
        self._thread = StorageThread(
            "job-writer",
            serve=self._serve,
            max_group=_MAX_GROUP,
            max_group_bytes=_MAX_GROUP_BYTES,
            max_waiting=_MAX_WAITING,
        )
        self._connection: sqlite3.Connection | None = None
        self._failing = False
        self.commits = 0

    @property
    def waiting(self) -> int:
        """Operations that wait for the next group."""
        return self._thread.waiting

    async def run(self, operation: Callable[[sqlite3.Connection], ResultT], *, size_bytes: int = 0) -> ResultT:
        """What `operation` returns, once it is durable. size_bytes: about what it writes, where that is much.

        What it raises undoes it alone. When the commit fails, all of its group failed, with the typed error; those
        that come later are tried again. `operation` may be called twice, the first time undone: where one that shares
        its commit fails.
        """
        return await self._thread.run(lambda: operation(self._open()), size_bytes=size_bytes)

    async def close(self) -> None:
        """Ends after the operations that wait."""
        await self._thread.close()
        await asyncio.to_thread(self._close)

    def _serve(self, group: Sequence[StorageTask]) -> None:
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

    def _transact(self, group: Sequence[StorageTask]) -> None:
        """Does all of it and commits."""
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

    def _all_went_well(self, group: Sequence[StorageTask]) -> bool:
        """Does all of it, or up to the first that fails by itself.

        Nearly none does, and to be able to undo one alone costs it two more statements: each is a wait for the turn of
        this thread among those that run Python.
        """
        try:
            for work in group:
                work.result = work.do()
        except Exception as error:  # noqa: BLE001 - it is raised again where it is done alone
            self._raise_for_all(error)
            return False
        return True

    def _attempt(self, connection: sqlite3.Connection, work: StorageTask) -> None:
        """Does it so that, where it fails, it is undone alone."""
        connection.execute("SAVEPOINT operation")
        try:
            work.result = work.do()
        except Exception as error:  # noqa: BLE001 - it is raised where the operation is awaited
            self._raise_for_all(error)
            connection.execute("ROLLBACK TO operation")
            work.error = error
        connection.execute("RELEASE operation")

    def _raise_for_all(self, error: Exception) -> None:
        """Raises what is wrong with the disk, or the file: every operation of the group gets that error."""
        if isinstance(error, sqlite3.Error) and self._typed(error) is not None:
            raise error

    def _fail(self, group: Sequence[StorageTask], error: BaseException) -> None:
        self._log_change(failing=True, error=error)
        self._close()
        for work in group:
            typed = self._typed(error) if isinstance(error, sqlite3.Error) else None
            if typed is not None:
                typed.__cause__ = error
            work.error = typed or error

    def _log_change(self, *, failing: bool, error: BaseException | None = None) -> None:
        """Logs the first failure and the first success after it."""
        if failing and not self._failing:
            _log.error("jobs cannot be written", exc_info=error)
        elif self._failing and not failing:
            _log.info("jobs can be written again")
        self._failing = failing

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _close(self) -> None:
        """Rolls back what is open; the next operation has a new connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # nothing of it was acknowledged
                connection.close()
