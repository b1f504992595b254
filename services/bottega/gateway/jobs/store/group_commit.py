"""Group commit: operations that wait go into one transaction, so that they share the wait for the disk.

One thread has the connection that writes. While it waits for the disk, other operations wait and form the next group.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from bottega.storage import SerialTask, SerialThread, TaskGroups

ResultT = TypeVar("ResultT")

# A group of 256 small operations takes some milliseconds, about as long as an fsync.
_MAX_GROUP = 256
_MAX_GROUP_BYTES = 32 << 20
_MAX_WAITING = 4096

_log = logging.getLogger(__name__)


class GroupCommit:
    """A queue of operations that run in the order in which they came. Each is durable when its future is done.

    Args:
        connect: Opens a connection without implicit transactions; called in the thread, and again after a failure.
        typed: Returns what to raise for an error of SQLite, or None if the error is a fault of ours.
        on_commit: Called in the thread with the seconds that each group took.
        check: Called in the thread before each group and after its commit, with whether it was committed, before any
            caller gets its result. It raises if what is committed would not last.
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
        """Return what `operation` returns, once it is durable.

        An operation that raises is undone alone. If the commit fails, its whole group fails with the typed error, and
        later operations are tried again. `operation` may be called twice: if another one of its group fails, the first
        call is undone.

        Args:
            operation: What to do with the connection.
            size_bytes: About how much it writes, if that is much.
        """
        return await self._thread.run(lambda: operation(self._open()), size_bytes=size_bytes)

    async def close(self) -> None:
        """Close after the operations that wait."""
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
        """Run all operations and commit."""
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
        """Run all operations, or those up to the first that fails by itself. Return whether none failed.

        Nearly none fails, and undoing one alone takes two more statements for each, at each of which this thread waits
        for the interpreter.
        """
        try:
            for work in group:
                work.result = work.do()
        except Exception as error:  # noqa: BLE001 - it is raised again when the operation runs alone
            self._raise_for_all(error)
            return False
        return True

    def _attempt(self, connection: sqlite3.Connection, work: SerialTask) -> None:
        """Run an operation so that it is undone alone if it fails."""
        connection.execute("SAVEPOINT operation")
        try:
            work.result = work.do()
        except Exception as error:  # noqa: BLE001 - it is raised where the operation is awaited
            self._raise_for_all(error)
            connection.execute("ROLLBACK TO operation")
            work.error = error
        connection.execute("RELEASE operation")

    def _raise_for_all(self, error: Exception) -> None:
        """Raise an error of the disk or the file: every operation of the group gets it."""
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
        """Log the first failure and the first success after it."""
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
        """Close the connection, which rolls back what is open; the next operation gets a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):  # nothing that is lost was acknowledged
                connection.close()
