"""The table of PostgreSQL in which caches store their embeddings, with the extension pgvector.

A search reads the entries of its exact key: few by the primary key, many by an HNSW graph of the cache's vectors of
that width, scanned until enough of the key are found (pgvector 0.8, iterative scan). A graph is built after the stored
entries are loaded, because loading into an existing graph is ten times slower. Until it is there, a search compares all
vectors of its key.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
import zlib
from collections.abc import Sequence

from psycopg import sql

from bottega.cache.index.vector_index import Numbers, Vectors
from bottega.errors import ConfigError, StorageUnavailable
from bottega.storage.postgresql import Connection, Migration, PostgresDatabase, lock, lock_call, rows_of

_LEAST_VERSION = [0, 8]
# Rows of one statement.
_ROWS = 1000
# The bound on a transaction that writes many vectors, into a graph if need be.
_WRITE_S = 600.0
# Upper bound on building a graph; 100,000 vectors of width 768 take some minutes of one core.
_BUILD_S = 3600.0
# pgvector's limit on the dimensions of an indexed vector; wider ones are compared one by one.
MAX_INDEXED = 2000
SEARCH_SETTINGS = {"hnsw.iterative_scan": "strict_order", "hnsw.ef_search": "100"}
"""Parameters of the connections, so that a search is one statement: how long a scan of the graph goes on.

With more neighbours (ef_search), it finds the nearest more often.
"""
# Settings while a graph is built. It is built much faster in memory; more than one process would need shared memory,
# of which containers have little.
_BUILDING = (
    f"SET statement_timeout = '{_BUILD_S:.0f}s'; SET lock_timeout = '{_BUILD_S:.0f}s';"
    " SET maintenance_work_mem = '1GB'; SET max_parallel_maintenance_workers = 0"
)
# Name of the lock of those who build graphs.
_LOCK = "graphs of the approximate cache"
# The columns that are written, with PostgreSQL's types as COPY needs them; the bytes of a vector are written as they
# are.
_COLUMNS = {
    "cache": "text", "key": "text", "number": "int8", "width": "int4", "checksum": "int8", "embedding": "bytea"
}  # fmt: skip

_log = logging.getLogger(__name__)

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


class VectorTable:
    """The rows of one cache in the table. Call `open` first; it may be repeated until it succeeds.

    Its methods raise StorageUnavailable and DataLoss.
    """

    def __init__(self, database: PostgresDatabase, *, cache: str) -> None:
        self._database = database
        self._cache = cache
        self._lock_name = f"vectors of the cache {cache}"
        # In the text of a statement, so that the planner knows that the graph is of this cache.
        self._literal = sql.Literal(cache).as_string()
        self._is_open = False

    async def open(self) -> None:
        """Connect and create the table. Raises ConfigError if rights, version or extension are wrong."""
        if self._is_open:
            return
        await self._database.open()
        await self._check_extension()
        await self._database.migrate("vectors of the approximate cache", _MIGRATIONS)
        self._is_open = True

    async def probe(self) -> None:
        """Test that the database answers and can be written."""
        await self.open()
        async with self._database.transaction() as connection:
            await self._lock(connection)
            await rows_of(connection, "DELETE FROM bottega_cache_vectors WHERE false")

    async def search(self, key: str, wanted: Vectors, count: int) -> list[tuple[int, float]]:
        """Return numbers and similarities of the key's most similar entries."""
        await self.open()
        width = len(wanted)
        typed, cache = f"embedding::vector({width})", self._literal.replace("%", "%%")
        query = (
            f"SELECT number, -({typed} <#> %(wanted)s::vector({width})) FROM bottega_cache_vectors"
            f" WHERE width = {width} AND cache = {cache} AND key = %(key)s"
            f" ORDER BY {typed} <#> %(wanted)s::vector({width}) LIMIT %(count)s"
        )
        parameters = {"wanted": _text(wanted), "key": key, "count": count}
        rows = await self._database.fetch(query, parameters)
        return [(int(number), float(similarity)) for number, similarity in rows]

    async def similarity(self, key: str, number: int, wanted: Vectors) -> float | None:
        """Return the similarity of one entry, or None if it does not exist."""
        await self.open()
        query = (
            "SELECT -(embedding <#> %s::vector) FROM bottega_cache_vectors"
            " WHERE cache = %s AND key = %s AND number = %s"
        )
        rows = await self._database.fetch(query, (_text(wanted), self._cache, key, number))
        return float(rows[0][0]) if rows else None

    async def read(self, key: str, numbers: Sequence[int]) -> list[list[float]]:
        """Return the vectors of those numbers that exist, in any order."""
        await self.open()
        query = "SELECT embedding::real[] FROM bottega_cache_vectors WHERE cache = %s AND key = %s AND number = ANY(%s)"
        return [row[0] for row in await self._database.fetch(query, (self._cache, key, list(numbers)))]

    async def numbers(self) -> list[tuple[str, int]]:
        """Return the keys and numbers of all entries."""
        await self.open()
        query = "SELECT key, number FROM bottega_cache_vectors WHERE cache = %s"
        return [(key, number) for key, number in await self._database.fetch(query, (self._cache,))]

    async def write(self, key: str, numbers: Numbers, vectors: Vectors) -> None:
        """Write the vectors that are missing or different."""
        await self.open()
        if len(numbers) == 1:
            await self._write_one(key, int(numbers[0]), vectors[0])
            return
        for first in range(0, len(numbers), _ROWS):
            await self._write(key, numbers[first : first + _ROWS].tolist(), vectors[first : first + _ROWS])

    async def delete(self, gone: Sequence[tuple[str, int]]) -> None:
        """Delete entries, given by key and number."""
        await self.open()
        keys, numbers = [key for key, _ in gone], [number for _, number in gone]
        query = (
            "DELETE FROM bottega_cache_vectors USING unnest(%s::text[], %s::bigint[]) AS gone (key, number)"
            " WHERE cache = %s AND bottega_cache_vectors.key = gone.key AND bottega_cache_vectors.number = gone.number"
        )
        await self._database.fetch(query, (keys, numbers, self._cache))

    async def build_graph(self, width: int) -> bool:
        """Build the graph of the vectors of a width, if there is none. Others may write the table meanwhile.

        Returns whether there is one now: while another cache builds one, nothing is done, because PostgreSQL ends one
        of two that are built at once.
        """
        await self.open()
        name = f"{_graphs_of(self._cache)}{width}"
        valid = f"SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('{name}')"
        async with self._database.connection(limit_s=_BUILD_S) as connection:
            found = await rows_of(connection, valid)
            if found == [(True,)]:
                return True
            began = time.monotonic()
            try:
                if await rows_of(connection, "SELECT pg_try_advisory_lock(hashtext(%s))", (_LOCK,)) == [(False,)]:
                    return False
                await connection.execute(_BUILDING.encode())
                await connection.execute(b"ANALYZE bottega_cache_vectors (cache, key, number, width)")
                if found:  # an earlier attempt was ended
                    await connection.execute(f"DROP INDEX CONCURRENTLY {name}".encode())
                await connection.execute(
                    f"CREATE INDEX CONCURRENTLY {name} ON bottega_cache_vectors USING hnsw"
                    f" ((embedding::vector({width})) vector_ip_ops)"
                    f" WHERE width = {width} AND cache = {self._literal}".encode()
                )
            finally:
                await connection.close()  # because of its settings and lock
        facts = {"width": width, "seconds": round(time.monotonic() - began, 1)}
        _log.info("a graph of the cache's embeddings is built", extra=facts)
        return True

    async def _write_one(self, key: str, number: int, vector: Vectors) -> None:
        """Write a vector by one statement, because each takes seconds while the server is slow."""
        call, lock_values = lock_call(self._lock_name)
        query = (
            f"INSERT INTO bottega_cache_vectors ({', '.join(_COLUMNS)})"
            f" SELECT %s, %s, %s, %s, %s, %s::vector FROM (SELECT {call}) AS locked"
            " ON CONFLICT (cache, key, number) DO UPDATE SET width = excluded.width, checksum = excluded.checksum,"
            " embedding = excluded.embedding WHERE bottega_cache_vectors.checksum <> excluded.checksum"
        )
        row = (self._cache, key, number, len(vector), zlib.crc32(vector.tobytes()), _text(vector))
        await self._database.fetch(query, row + lock_values)

    async def _write(self, key: str, numbers: list[int], vectors: Vectors) -> None:
        where = "FROM bottega_cache_vectors WHERE cache = %s AND key = %s AND number = ANY(%s)"
        checksums = [zlib.crc32(vector.tobytes()) for vector in vectors]
        async with self._database.transaction(limit_s=_WRITE_S) as connection:
            await connection.execute(f"SET LOCAL statement_timeout = '{_WRITE_S:.0f}s'".encode())
            await self._lock(connection)
            stored = dict(await rows_of(connection, f"SELECT number, checksum {where}", (self._cache, key, numbers)))
            changed = [
                (self._cache, key, number, len(vector), checksum, _binary(vector))
                for number, checksum, vector in zip(numbers, checksums, vectors, strict=True)
                if stored.get(number) != checksum
            ]
            replaced = [number for _, _, number, *_ in changed if number in stored]
            if replaced:
                await rows_of(connection, f"DELETE {where}", (self._cache, key, replaced))
            if changed:
                into = f"COPY bottega_cache_vectors ({', '.join(_COLUMNS)}) FROM STDIN (FORMAT BINARY)"
                async with connection.cursor().copy(into.encode()) as copy:
                    copy.set_types(list(_COLUMNS.values()))
                    for row in changed:
                        await copy.write_row(row)

    async def _lock(self, connection: Connection) -> None:
        """Keep other writers of this cache's rows out until the end of the transaction."""
        await lock(connection, self._lock_name)

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


async def forget_vectors(database: PostgresDatabase, cache: str) -> None:
    """Delete all vectors and graphs of a cache that is gone for good."""
    if await database.fetch("SELECT 1 WHERE to_regclass('bottega_cache_vectors') IS NULL"):
        return
    await database.fetch("DELETE FROM bottega_cache_vectors WHERE cache = %s", (cache,))
    query = "SELECT relname FROM pg_class WHERE relkind = 'i' AND starts_with(relname, %s)"
    for (name,) in await database.fetch(query, (_graphs_of(cache),)):
        await database.fetch(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")


def _graphs_of(cache: str) -> str:
    """Return how the names of a cache's graphs begin; the width follows."""
    return f"bottega_cache_{hashlib.sha256(cache.encode()).hexdigest()[:16]}_"


def _text(vector: Vectors) -> str:
    """Return a vector as pgvector reads it; nine digits keep every bit of single precision."""
    return "[" + ",".join(f"{value:.9g}" for value in vector.tolist()) + "]"


def _binary(vector: Vectors) -> bytes:
    """Return a vector in pgvector's binary format: number of dimensions, 0, and big-endian numbers."""
    return struct.pack(">hh", len(vector), 0) + vector.astype(">f4").tobytes()
