"""PostgreSQL for threads: an event loop in a thread of its own runs their operations.

Import this module only where a database is configured: it needs the extra `postgresql`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from bottega.errors import ConfigError, DataLoss, StorageUnavailable
from bottega.storage import os_errors
from bottega.storage.postgresql import PostgresDatabase

ResultT = TypeVar("ResultT")

# Longer than closing the pool may take.
_STOP_S = 20.0


class DatabaseThread:
    """A database whose operations any thread may run. Call `start` first, and `close` at the end.

    Args:
        url: A `postgresql://` URL.
        application: See PostgresDatabase, as for `settings`.
    """

    def __init__(self, url: str, *, application: str, settings: Mapping[str, str] | None = None) -> None:
        self.database = PostgresDatabase(url, application=application, max_connections=6, settings=settings)
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="database", daemon=True)

    @property
    def place(self) -> str:
        """Host, port and name of the database, for messages."""
        return self.database.place

    def start(self, opening: Coroutine[Any, Any, object], timeout_s: float) -> None:
        """Start the thread, and run an operation that opens the database. It may fail while the database is away.

        Raises ConfigError if the URL, the rights or the schema are wrong.
        """
        if not self._thread.is_alive():
            self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(opening, timeout_s), self._loop).result()
        except (StorageUnavailable, TimeoutError):
            return

    def run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float) -> ResultT:
        """Return the result of operations, within a time. Raise StorageUnavailable, which names the database.

        Operations that take longer are cancelled, but not waited for: a slow server takes its time for that, too.
        """
        with self._lock:
            if not self._closed:
                running = asyncio.run_coroutine_threadsafe(work, self._loop)
            else:
                work.close()
                raise os_errors.unavailable(f"the database {self.place} is closed", cause=os_errors.NOT_OPEN)
        try:
            return running.result(timeout_s)
        except TimeoutError as error:
            running.cancel()
            text = f"the database {self.place} does not answer within {timeout_s:g} s"
            raise os_errors.unavailable(text, cause="ETIMEDOUT") from error
        except CancelledError:
            raise os_errors.unavailable(f"the database {self.place} is closed", cause=os_errors.NOT_OPEN) from None
        except ConfigError as error:  # it was away at the start
            raise os_errors.unavailable(error.message, cause="ECONFIG") from error
        except (StorageUnavailable, DataLoss) as error:
            text = f"the database {self.place} cannot be used: {error.message}"
            raise os_errors.unavailable(text, cause=error.metadata.get("cause", "EIO")) from error

    def create_task(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        """Start a task that `close` cancels. Call it in the thread of the event loop."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function in the thread of the event loop. Do nothing after `close`."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """Cancel the tasks, close the connections, and end the thread. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.database.close()
