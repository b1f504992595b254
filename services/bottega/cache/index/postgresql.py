"""An index of the cache in PostgreSQL with the extension pgvector: the vectors are in a table, not in memory.

Import this module only where a database is configured: it needs the extra `postgresql`. The numbers of the entries are
in memory as well, so the database is asked only for vectors and similarities. A search reads the entries of its exact
key: few by the primary key, many by an HNSW graph of all vectors of their width, scanned until enough of the key are
found (pgvector 0.8, iterative scan).

While the database is away, searches and additions raise StorageUnavailable, at most one a second after a wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
import zlib
from collections.abc import Coroutine, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.vector_index import MAX_COUNT, Match, Numbers, Vectors, unit_vectors
from bottega.errors import ConfigError, QueueFull, StorageUnavailable
from bottega.storage import os_errors
from bottega.storage.postgresql import Migration, PostgresDatabase, rows_of

ResultT = TypeVar("ResultT")

# A job waits for its answer for some ten milliseconds; a later one may still serve it.
_SEARCH_S = 0.5
_CHANGE_S = 10.0
_LOAD_S = 600.0
# After a failure, calls fail at once for so long.
_AWAY_S = 1.0
# Removed entries are deleted together after so long.
_BATCH_S = 0.05
_LEAST_VERSION = [0, 8]
# Rows of one statement, and a bound on the rows that a search may have to skip because they could not be deleted.
_ROWS = 1000
_MAX_SKIPPED = 1000
# pgvector's limit on the dimensions of an indexed vector; wider ones are compared one by one.
_MAX_INDEXED = 2000
# Neighbours that a scan of the graph keeps (pgvector's hnsw.ef_search): more find the nearest more often.
_BREADTH = 100

_MIGRATIONS = (
    Migration(
        statements="""
        CREATE TABLE bottega_cache_vectors (
            cache text NOT NULL, key text NOT NULL, number bigint NOT NULL, width integer NOT NULL,
            checksum bigint NOT NULL, embedding vector NOT NULL, PRIMARY KEY (cache, key, number));
        ALTER TABLE bottega_cache_vectors ALTER embedding SET STORAGE MAIN
        """
    ),
)


class PostgresIndex:
    """An `EntryIndex` in a table of PostgreSQL. Any thread may use it. Call `open` first, and `close` at the end.

    Args:
        url: A `postgresql://` URL.
        cache: Name of the cache, whose entries are separate from those of other caches in the same table.
        max_entries: Upper bound on the number of entries of all keys.
    """

    def __init__(self, url: str, *, cache: str, max_entries: int = 2_000_000) -> None:
        self._database = PostgresDatabase(url, application="bottega cache", max_connections=4)
        self._cache = cache
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._numbers: dict[str, set[int]] = {}  # by key
        self._widths: dict[str, int] = {}  # by key
        self._graphs: set[int] = set()  # widths whose graph exists
        self._undeleted: set[tuple[str, int]] = set()
        self._entries = 0
        self._is_open = self._closed = False
        self._away_until = 0.0
        self._loop = asyncio.new_event_loop()
        self._changing = asyncio.Lock()  # of the table's rows
        self._deleting: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="cache-database", daemon=True)

    def __len__(self) -> int:
        return self._entries

    def open(self) -> None:
        """Connect and create the table. If the database cannot be reached now, it is tried again with each call.

        Raises ConfigError if the URL, the rights, the schema's version or the extension are wrong.
        """
        self._thread.start()
        try:
            self._run(self._open(), _CHANGE_S)
        except StorageUnavailable:
            return

    def load(self, key: str, numbers: Numbers, vectors: NDArray[np.floating]) -> None:
        made = unit_vectors(vectors)
        if made.ndim != 2 or len(made) != len(numbers) or len(np.unique(numbers)) != len(numbers):
            raise ValueError("numbers must be unique, with one vector for each")
        if len(numbers):
            _check_number(int(numbers.min()))
            self._add(key, numbers, made, timeout_s=_LOAD_S)

    def loaded(self) -> None:
        """Delete the vectors of entries that were not loaded."""
        self._run(self._delete_strays(), _LOAD_S)

    def add(self, key: str, number: int, vector: NDArray[np.floating]) -> None:
        _check_number(number)
        self._add(key, np.array([number], np.int64), unit_vectors(vector)[None], timeout_s=_CHANGE_S)

    def remove(self, key: str, number: int) -> bool:
        with self._lock:
            known = self._numbers.get(key, set())
            if number not in known:
                return False
            known.remove(number)
            self._entries -= 1
            if not known:
                del self._numbers[key], self._widths[key]
            self._undeleted.add((key, number))
        self._loop.call_soon_threadsafe(self._start_deleting)
        return True

    def search(self, key: str, vector: NDArray[np.floating], count: int) -> list[Match]:
        if not 1 <= count <= MAX_COUNT:
            raise ValueError(f"count must be from 1 to {MAX_COUNT}")
        wanted = self._wanted(key, vector)
        with self._lock:
            skipped = sum(other == key for other, _ in self._undeleted)
        if wanted is None:
            return []
        rows = self._run(self._search(key, wanted, count + min(skipped, _MAX_SKIPPED)), _SEARCH_S)
        known = self._numbers.get(key, set())
        found = (
            Match(number=number, similarity=min(similarity, 1.0)) for number, similarity in rows if number in known
        )
        return list(islice(found, count))

    def similarity(self, key: str, number: int, vector: NDArray[np.floating]) -> float | None:
        wanted = self._wanted(key, vector)
        if wanted is None or number not in self._numbers.get(key, set()):
            return None
        query = (
            "SELECT -(embedding <#> %s::vector) FROM bottega_cache_vectors"
            " WHERE cache = %s AND key = %s AND number = %s"
        )
        rows = self._run(self._fetch(query, (_text(wanted), self._cache, key, number)), _SEARCH_S)
        return min(float(rows[0][0]), 1.0) if rows else None

    def sample(self, key: str, count: int) -> Vectors:
        """Return vectors of random entries of the key; none while the database is away."""
        numbers = np.array(list(self._numbers.get(key, ())), np.int64)
        chosen = np.random.default_rng().permutation(numbers)[:count].tolist()
        query = "SELECT embedding::real[] FROM bottega_cache_vectors WHERE cache = %s AND key = %s AND number = ANY(%s)"
        try:
            rows = self._run(self._fetch(query, (self._cache, key, chosen)), _CHANGE_S) if chosen else []
        except StorageUnavailable:
            rows = []
        return np.array([row[0] for row in rows], np.float32) if rows else np.empty((0, 0), np.float32)

    def entries(self, key: str) -> int:
        return len(self._numbers.get(key, ()))

    def close(self) -> None:
        """Refuse new entries, and close the connections. May be called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(2 * _CHANGE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _add(self, key: str, numbers: Numbers, vectors: Vectors, *, timeout_s: float) -> None:
        width = vectors.shape[1]
        with self._lock:
            if self._closed:
                raise LookupError("the index is closed")
            known = self._numbers.get(key, set())
            if known and width != self._widths[key]:
                raise ValueError(_wrong_width(self._widths[key], width))
            new = set(numbers.tolist()) - known
            if self._entries + len(numbers) > self._max_entries:
                raise QueueFull(f"the index is full: it has {self._max_entries} entries (max_entries)")
        self._run(self._write(key, numbers, vectors), timeout_s)
        with self._lock:
            self._numbers.setdefault(key, set()).update(new)
            self._widths[key] = width
            self._entries += len(new)
            self._undeleted.difference_update((key, number) for number in new)

    def _wanted(self, key: str, vector: NDArray[np.floating]) -> Vectors | None:
        """Return the vector to search for; None if the key has no entries. Raise ValueError if it does not fit."""
        wanted = unit_vectors(vector)
        width = self._widths.get(key)
        if width is not None and wanted.shape[-1] != width:
            raise ValueError(_wrong_width(width, wanted.shape[-1]))
        return wanted if width is not None else None

    def _run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float) -> ResultT:
        """Return the result of database calls, within a time. Raise StorageUnavailable, at once after a failure."""
        if self._closed or time.monotonic() < self._away_until:
            work.close()
            raise os_errors.unavailable("the cache's database is away", cause="ETIMEDOUT")
        try:
            return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout_s), self._loop).result()
        except TimeoutError as error:
            self._away_until = time.monotonic() + _AWAY_S
            text = f"the cache's database {self._database.place} does not answer within {timeout_s:g} s"
            raise os_errors.unavailable(text, cause="ETIMEDOUT") from error
        except StorageUnavailable:
            self._away_until = time.monotonic() + _AWAY_S
            raise

    # In the thread of the event loop.

    async def _open(self) -> None:
        if self._is_open:
            return
        await self._database.open()
        await self._check_extension()
        await self._database.migrate("vectors of the approximate cache", _MIGRATIONS)
        self._is_open = True

    async def _check_extension(self) -> None:
        """Create the extension if it is missing. Raise ConfigError if that is impossible, or if it is too old."""
        place, remedy = self._database.place, "let a superuser run CREATE EXTENSION vector in it"
        version = "SELECT string_to_array(extversion, '.')::integer[] FROM pg_extension WHERE extname = 'vector'"
        found = await self._database.fetch(version)
        if not found:
            if not await self._database.fetch("SELECT 1 FROM pg_available_extensions WHERE name = 'vector'"):
                raise ConfigError(f"the server of the database {place} lacks pgvector: install it, and {remedy}")
            try:
                await self._database.fetch("CREATE EXTENSION IF NOT EXISTS vector")
            except StorageUnavailable as error:
                if error.metadata.get("cause") != "InsufficientPrivilege":
                    raise
                raise ConfigError(f"the database {place} lacks the extension vector: {remedy}") from error
            found = await self._database.fetch(version)
        if found[0][0] < _LEAST_VERSION:
            shown = ".".join(map(str, found[0][0]))
            raise ConfigError(f"the database {place} has pgvector {shown}; 0.8 or newer is needed")

    async def _fetch(self, query: str, parameters: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        await self._open()
        return await self._database.fetch(query, parameters)

    async def _search(self, key: str, wanted: Vectors, count: int) -> list[tuple[int, float]]:
        await self._open()
        width = len(wanted)
        typed = f"embedding::vector({width})"
        query = (
            f"SELECT number, -({typed} <#> %(wanted)s::vector({width})) FROM bottega_cache_vectors"
            f" WHERE width = {width} AND cache = %(cache)s AND key = %(key)s"
            f" ORDER BY {typed} <#> %(wanted)s::vector({width}) LIMIT %(count)s"
        )
        parameters = {"wanted": _text(wanted), "cache": self._cache, "key": key, "count": count}
        async with self._database.transaction(limit_s=_CHANGE_S) as connection:
            await connection.execute(
                f"SET LOCAL hnsw.iterative_scan = strict_order; SET LOCAL hnsw.ef_search = {_BREADTH}".encode()
            )
            return [
                (int(number), float(similarity)) for number, similarity in await rows_of(connection, query, parameters)
            ]

    async def _write(self, key: str, numbers: Numbers, vectors: Vectors) -> None:
        """Write the vectors that are missing or different."""
        await self._open()
        await self._make_graph(vectors.shape[1])
        checksums = [zlib.crc32(vector.tobytes()) for vector in vectors]
        query = "SELECT number, checksum FROM bottega_cache_vectors WHERE cache = %s AND key = %s AND number = ANY(%s)"
        async with self._changing:
            with self._lock:
                self._undeleted.difference_update((key, number) for number in numbers.tolist())
            stored = dict(await self._database.fetch(query, (self._cache, key, numbers.tolist())))
            rows = [
                (self._cache, key, number, vectors.shape[1], checksum, _text(vector))
                for number, checksum, vector in zip(numbers.tolist(), checksums, vectors, strict=True)
                if stored.get(number) != checksum
            ]
            insert = (
                "INSERT INTO bottega_cache_vectors VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (cache, key, number)"
                " DO UPDATE SET width = excluded.width, checksum = excluded.checksum, embedding = excluded.embedding"
            )
            for first in range(0, len(rows), _ROWS):
                async with self._database.transaction(limit_s=_LOAD_S) as connection:
                    await connection.cursor().executemany(insert.encode(), rows[first : first + _ROWS])

    async def _make_graph(self, width: int) -> None:
        """Create the graph of the vectors of a width, while there are none."""
        if width in self._graphs or width > _MAX_INDEXED:
            return
        await self._database.fetch(
            f"CREATE INDEX IF NOT EXISTS bottega_cache_vectors_{width} ON bottega_cache_vectors"
            f" USING hnsw ((embedding::vector({width})) vector_ip_ops) WHERE width = {width}"
        )
        self._graphs.add(width)

    def _start_deleting(self) -> None:
        if self._deleting is None or self._deleting.done():
            self._deleting = self._loop.create_task(self._delete_soon())

    async def _delete_soon(self) -> None:
        """Delete the vectors of removed entries, many at once. While the database is away, try again."""
        while self._undeleted:
            await asyncio.sleep(_BATCH_S)
            try:
                await self._open()
                async with self._changing:
                    with self._lock:
                        gone = list(islice(self._undeleted, _ROWS))
                    await self._delete_rows(gone)
            except StorageUnavailable:
                await asyncio.sleep(_AWAY_S)

    async def _delete_rows(self, gone: Sequence[tuple[str, int]]) -> None:
        keys, numbers = [key for key, _ in gone], [number for _, number in gone]
        query = (
            "DELETE FROM bottega_cache_vectors USING unnest(%s::text[], %s::bigint[]) AS gone (key, number)"
            " WHERE cache = %s AND bottega_cache_vectors.key = gone.key AND bottega_cache_vectors.number = gone.number"
        )
        await self._database.fetch(query, (keys, numbers, self._cache))
        with self._lock:
            self._undeleted.difference_update(gone)

    async def _delete_strays(self) -> None:
        await self._open()
        stored = await self._database.fetch(
            "SELECT key, number FROM bottega_cache_vectors WHERE cache = %s", (self._cache,)
        )
        with self._lock:
            strays = {(key, number) for key, number in stored if number not in self._numbers.get(key, ())}
            self._undeleted |= strays
        self._start_deleting()

    async def _stop(self) -> None:
        if self._deleting is not None:
            self._deleting.cancel()
            await asyncio.gather(self._deleting, return_exceptions=True)
        await self._database.close()


def _check_number(number: int) -> None:
    if number < 0:
        raise ValueError("an entry's number must be at least 0")


def _wrong_width(width: int, found: int) -> str:
    return f"vectors of this key must have {width} dimensions, not {found}"


def _text(vector: Vectors) -> str:
    """Return a vector as pgvector reads it; nine digits keep every bit of single precision."""
    return "[" + ",".join(f"{value:.9g}" for value in vector.tolist()) + "]"
