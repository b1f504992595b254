"""An index of the cache in PostgreSQL: the vectors are in a table (`vector_table`), not in memory.

Import this module only where a database is configured: it needs the extra `postgresql`. The numbers of the entries are
in memory as well, so the database is asked only for vectors and similarities. Its calls run in a thread of their own.

While the database is away, searches and additions raise StorageUnavailable, at most one a second after a wait.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterable
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.vector_index import MAX_COUNT, Match, Numbers, Vectors, unit_vectors
from bottega.cache.index.vector_table import MAX_INDEXED, SEARCH_SETTINGS, VectorTable
from bottega.errors import BottegaError, QueueFull, StorageUnavailable
from bottega.storage import os_errors
from bottega.storage.postgresql_thread import DatabaseThread

ResultT = TypeVar("ResultT")

# A job waits for its answer for some ten milliseconds; a later one may still serve it.
_SEARCH_S = 0.5
_CHANGE_S = 10.0
_LOAD_S = 600.0
# After a failure, searches fail at once for so long.
_AWAY_S = 1.0
# Removed entries are deleted together after so long.
_BATCH_S = 0.05
# Removed entries that are deleted at once, and a bound on the rows that a search may have to skip because they could
# not be deleted.
_ROWS = 1000
_MAX_SKIPPED = 1000
# Seconds between two attempts to build a graph while another cache builds one, and between two after other failures.
_TURN_S = 1.0
_RETRY_S = 30.0

_log = logging.getLogger(__name__)


def cache_database(url: str) -> DatabaseThread:
    """Return the database of a cache. Raises ConfigError if the URL is not valid."""
    return DatabaseThread(url, application="bottega cache", settings=SEARCH_SETTINGS)


class PostgresIndex:
    """An `EntryIndex` in a table of PostgreSQL. Any thread may use it. Call `open` first, and `close` at the end.

    Args:
        database: See `cache_database`. The index starts and closes it.
        cache: ID of the cache, whose entries are separate from those of other caches in the same table.
        max_entries: Upper bound on the number of entries of all keys.
    """

    def __init__(self, database: DatabaseThread, *, cache: str, max_entries: int = 2_000_000) -> None:
        self._database = database
        self._table = VectorTable(database.database, cache=cache)
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._numbers: dict[str, set[int]] = {}  # by key
        self._widths: dict[str, int] = {}  # by key
        self._graphs: set[int] = set()  # widths whose graph was built
        self._undeleted: dict[str, set[int]] = {}  # by key: removed entries whose vectors are still in the table
        self._entries = 0
        self._closed = False
        self._away_until = 0.0
        self._is_away = False
        self._changing = asyncio.Lock()  # of the table's rows
        self._deleting: asyncio.Task[None] | None = None
        self._building: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return self._entries

    def open(self) -> None:
        """Connect and create the table. If the database cannot be reached now, it is tried again with each call.

        Raises ConfigError if the URL, the rights, the schema's version or the extension are wrong.
        """
        self._database.start(self._table.open(), _CHANGE_S)

    def load(self, key: str, numbers: Numbers, vectors: NDArray[np.floating]) -> None:
        made = unit_vectors(vectors)
        if made.ndim != 2 or len(made) != len(numbers) or len(np.unique(numbers)) != len(numbers):
            raise ValueError("numbers must be unique, with one vector for each")
        if len(numbers):
            _check_number(int(numbers.min()))
            self._add(key, numbers, made, timeout_s=_LOAD_S)

    def loaded(self) -> None:
        """Delete the vectors of entries that were not loaded, and begin to build graphs of those that were."""
        self._database.run(self._delete_strays(), _LOAD_S)
        self._database.call_soon(self._start_building)

    @property
    def has_graphs(self) -> bool:
        """Whether the graphs of all vectors are built, so that searches need not compare all of them."""
        return not self._missing_graphs()

    def add(self, key: str, number: int, vector: NDArray[np.floating]) -> None:
        _check_number(number)
        try:
            self._add(key, np.array([number], np.int64), unit_vectors(vector)[None], timeout_s=_CHANGE_S)
        except StorageUnavailable:
            with self._lock:
                if number not in self._numbers.get(key, ()):  # its vector may have been written
                    self._undeleted.setdefault(key, set()).add(number)
            self._database.call_soon(self._start_deleting)
            raise
        self._database.call_soon(self._start_building)

    def remove(self, key: str, number: int) -> bool:
        with self._lock:
            known = self._numbers.get(key, set())
            if number not in known:
                return False
            known.remove(number)
            self._entries -= 1
            if not known:
                del self._numbers[key], self._widths[key]
            self._undeleted.setdefault(key, set()).add(number)
        self._database.call_soon(self._start_deleting)
        return True

    def search(self, key: str, vector: NDArray[np.floating], count: int) -> list[Match]:
        if not 1 <= count <= MAX_COUNT:
            raise ValueError(f"count must be from 1 to {MAX_COUNT}")
        wanted = self._wanted(key, vector)
        with self._lock:
            skipped = len(self._undeleted.get(key, ()))
        if wanted is None:
            return []
        rows = self._answer(self._table.search(key, wanted, count + min(skipped, _MAX_SKIPPED)))
        known = self._numbers.get(key, set())
        found = (
            Match(number=number, similarity=min(similarity, 1.0)) for number, similarity in rows if number in known
        )
        return list(islice(found, count))

    def similarity(self, key: str, number: int, vector: NDArray[np.floating]) -> float | None:
        wanted = self._wanted(key, vector)
        if wanted is None or number not in self._numbers.get(key, set()):
            return None
        found = self._answer(self._table.similarity(key, number, wanted))
        return None if found is None else min(found, 1.0)

    def sample(self, key: str, count: int) -> Vectors:
        """Return vectors of random entries of the key; none while the database is away."""
        numbers = np.array(list(self._numbers.get(key, ())), np.int64)
        chosen = np.random.default_rng().permutation(numbers)[:count].tolist()
        try:
            rows = self._database.run(self._table.read(key, chosen), _CHANGE_S) if chosen else []
        except StorageUnavailable:
            rows = []
        return np.array(rows, np.float32) if rows else np.empty((0, 0), np.float32)

    def entries(self, key: str) -> int:
        return len(self._numbers.get(key, ()))

    def probe(self) -> None:
        self._database.run(self._table.probe(), _CHANGE_S)

    def close(self) -> None:
        """Refuse new entries, and close the connections. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._database.close()

    def _add(self, key: str, numbers: Numbers, vectors: Vectors, *, timeout_s: float) -> None:
        width = vectors.shape[1]
        with self._lock:
            if self._closed:
                raise LookupError("the index is closed")
            known = self._numbers.get(key, set())
            if known and width != self._widths[key]:
                raise ValueError(_wrong_width(self._widths[key], width))
            if self._entries + len(numbers) > self._max_entries:
                raise QueueFull(f"the index is full: it has {self._max_entries} entries (max_entries)")
        self._database.run(self._write(key, numbers, vectors), timeout_s)

    def _wanted(self, key: str, vector: NDArray[np.floating]) -> Vectors | None:
        """Return the vector to search for; None if the key has no entries. Raise ValueError if it does not fit."""
        wanted = unit_vectors(vector)
        width = self._widths.get(key)
        if width is not None and wanted.shape[-1] != width:
            raise ValueError(_wrong_width(width, wanted.shape[-1]))
        return wanted if width is not None else None

    def _answer(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Return the result of a search. After a failure, fail at once for a while. Log the first failure, and the end.

        Raises StorageUnavailable.
        """
        if time.monotonic() < self._away_until:
            work.close()
            raise os_errors.unavailable(f"the database {self._database.place} is away", cause="ETIMEDOUT")
        try:
            result = self._database.run(work, _SEARCH_S)
        except StorageUnavailable as error:
            self._away_until = time.monotonic() + _AWAY_S
            # Without their graph, searches among many may take too long.
            if self.has_graphs and not (self._is_away or self._closed):
                _log.warning("pictures begin from noise until the cache's database answers", extra=self._facts(error))
                self._is_away = True
            raise
        if self._is_away:
            self._is_away = False
            _log.info("the cache's database answers again", extra=self._facts())
        return result

    def _facts(self, error: BottegaError | None = None) -> dict[str, str]:
        return {"database": self._database.place} | ({"text": error.message} if error is not None else {})

    # In the thread of the event loop.

    async def _write(self, key: str, numbers: Numbers, vectors: Vectors) -> None:
        """Write vectors, and then add their entries."""
        async with self._changing:
            await self._table.write(key, numbers, vectors)
            with self._lock:
                known = self._numbers.setdefault(key, set())
                self._entries += len(set(numbers.tolist()) - known)
                known.update(numbers.tolist())
                self._widths[key] = vectors.shape[1]
                self._forget_undeleted(key, numbers.tolist())

    def _forget_undeleted(self, key: str, numbers: Iterable[int]) -> None:
        """Note, under the lock, that these vectors need not be deleted any more."""
        left = self._undeleted.get(key, set())
        left.difference_update(numbers)
        if not left:
            self._undeleted.pop(key, None)

    def _start_deleting(self) -> None:
        if self._deleting is None or self._deleting.done():
            self._deleting = self._database.create_task(self._delete_soon())

    async def _delete_soon(self) -> None:
        """Delete the vectors of removed entries, many at once. While the database is away, try again."""
        while self._undeleted:
            await asyncio.sleep(_BATCH_S)
            try:
                async with self._changing:
                    with self._lock:
                        each = ((key, number) for key, numbers in self._undeleted.items() for number in numbers)
                        gone = list(islice(each, _ROWS))
                    await self._table.delete(gone)
                    with self._lock:
                        for key, number in gone:
                            self._forget_undeleted(key, [number])
            except BottegaError:
                await asyncio.sleep(_AWAY_S)
            except Exception:  # noqa: BLE001 - the boundary of a task whose end nobody would see
                _log.exception("the embeddings of removed entries cannot be deleted, and are tried again")
                await asyncio.sleep(_RETRY_S)

    async def _delete_strays(self) -> None:
        async with self._changing:
            stored = await self._table.numbers()
            with self._lock:
                for key, number in stored:
                    if number not in self._numbers.get(key, ()):
                        self._undeleted.setdefault(key, set()).add(number)
        self._start_deleting()

    def _start_building(self) -> None:
        if (self._building is None or self._building.done()) and not self.has_graphs:
            self._building = self._database.create_task(self._build())

    def _missing_graphs(self) -> set[int]:
        """Return the widths of vectors whose graph is not known to exist."""
        with self._lock:
            return {width for width in self._widths.values() if width <= MAX_INDEXED} - self._graphs

    async def _build(self) -> None:
        """Build the missing graphs. While the database is away, try again."""
        while missing := self._missing_graphs():
            width = min(missing)
            try:
                if await self._table.build_graph(width):
                    self._graphs.add(width)
                else:
                    await asyncio.sleep(_TURN_S)
            except BottegaError as error:
                _log.warning("searches compare all embeddings, as their graph is not built", extra=self._facts(error))
                await asyncio.sleep(_RETRY_S)
            except Exception:  # noqa: BLE001 - the boundary of a task whose end nobody would see
                _log.exception("searches compare all embeddings, as their graph is not built")
                await asyncio.sleep(_RETRY_S)


def _check_number(number: int) -> None:
    if number < 0:
        raise ValueError("an entry's number must be at least 0")


def _wrong_width(width: int, found: int) -> str:
    return f"vectors of this key must have {width} dimensions, not {found}"
