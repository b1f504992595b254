"""The catalogue of LoRAs in PostgreSQL, which all stores of a fleet share; has the methods of LoraCatalogue.

Import this module only where a database is configured: it needs the extra `postgresql`. A row has a LoRA's description,
whose checksum detects damage. A damaged row is skipped, and replaced when its LoRA is uploaded again or restored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from bottega.background_tasks import run_to_end
from bottega.errors import DataLoss, StorageUnavailable
from bottega.loras.catalogue import MAX_LORAS, exists_otherwise, log_damaged, not_found, too_many_loras_error
from bottega.loras.records import CatalogueRecord, damaged_row, description_of, description_stem, read_description
from bottega.storage.postgresql import Connection, Migration, PostgresDatabase, lock, rows_of

_MIGRATIONS = (
    Migration(
        statements="""
        CREATE TABLE bottega_loras (
            name text COLLATE "C" PRIMARY KEY, digest text NOT NULL, base text NOT NULL, size_bytes bigint NOT NULL,
            pinned boolean NOT NULL, description text NOT NULL);
        CREATE INDEX bottega_loras_digest ON bottega_loras (digest)
        """
    ),
)
_COLUMNS = "name, digest, description"
# One store at a time changes LoRAs, and uploads or deletes their objects meanwhile. A store that is frozen or cut off
# loses the lock after so long without a sign of life.
_SILENT_S = 60.0
_SIGN_S = 10.0
# An upload of 4 GiB at 10 MiB/s takes seven minutes.
_HOLD_S = 900.0
_WAIT_S = 60.0
_BOUNDS = f"""
    SET LOCAL lock_timeout = '{_WAIT_S:g}s'; SET LOCAL statement_timeout = '{_WAIT_S:g}s';
    SET LOCAL idle_in_transaction_session_timeout = '{_SILENT_S:g}s'"""


class SharedCatalogue:
    """The catalogue of the LoRAs of all stores that use a database.

    Call `open` first. Every method may raise StorageUnavailable, or DataLoss for a damaged row.

    Args:
        url: A `postgresql://` URL.
    """

    def __init__(self, url: str) -> None:
        self._database = PostgresDatabase(url, application="bottega LoRA store", max_connections=4)
        self._damaged: set[str] = set()
        self.write_lock = SharedLock(self._database)
        """Held while the catalogue and files are changed together, by one store at a time."""

    async def open(self) -> None:
        """Connect, and create or upgrade the table. Raises ConfigError if the database cannot be used."""
        await self._database.open()
        await self._database.migrate("loras", _MIGRATIONS)

    async def close(self) -> None:
        await self._database.close()

    async def add(self, record: CatalogueRecord, *, rewords: bool = False) -> CatalogueRecord:
        """Add a LoRA, and return its record; see LoraCatalogue.add."""
        async with self._changing() as connection:
            query = f"SELECT {_COLUMNS} FROM bottega_loras WHERE name = %s OR digest = %s"
            rows = await rows_of(connection, query, (record.name, record.digest))
            sound = {found.name: found for found in self._sound(rows)}
            damaged = [name for name, _, _ in rows if name not in sound]
            await connection.execute("DELETE FROM bottega_loras WHERE name = ANY(%s)", (damaged,))
            self._damaged.difference_update(damaged)
            found = sound.get(record.name)
            if found is not None:
                if (found.digest, found.base) != (record.digest, record.base):
                    raise exists_otherwise(found)
                if not rewords:
                    return found
                return await _write(connection, replace(found, trigger_words=record.trigger_words))
            ((count,),) = await rows_of(connection, "SELECT count(*) FROM bottega_loras")
            if count >= MAX_LORAS:
                raise too_many_loras_error()
            return await _write(connection, record)

    async def get(self, name: str) -> CatalogueRecord:
        """Return the LoRA with a name. Raises LoraNotFound, and DataLoss for a damaged row."""
        async with self._database.connection() as connection:
            return await _get(connection, name)

    async def page(self, *, size: int, after: str, base: str) -> list[CatalogueRecord]:
        """Return up to `size` LoRAs sorted by name, from after the name `after`. `base` "" means any base model."""
        found: list[CatalogueRecord] = []
        while True:
            where = "WHERE name > %s AND (%s::text = '' OR base = %s) ORDER BY name LIMIT %s"
            rows = await self._rows(where, after, base, base, size)
            found += self._sound(rows)
            if len(rows) < size or len(found) >= size:
                return found[:size]
            after = rows[-1][0]

    async def remove(self, name: str) -> None:
        """Delete the row of a LoRA. Raises LoraNotFound, and DataLoss for a damaged row."""
        async with self._changing() as connection:
            await _get(connection, name)
            await connection.execute("DELETE FROM bottega_loras WHERE name = %s", (name,))

    async def change(self, name: str, changed: Callable[[CatalogueRecord], CatalogueRecord]) -> CatalogueRecord:
        """Replace a LoRA's record with the result of `changed`; see LoraCatalogue.change."""
        async with self._changing() as connection:
            return await _write(connection, changed(await _get(connection, name)))

    async def all(self) -> list[CatalogueRecord]:
        """Return all LoRAs."""
        return self._sound(await self._rows("ORDER BY name"))

    async def pinned(self) -> dict[str, int]:
        """Return the digests of all pinned LoRAs, with their sizes in bytes."""
        return {record.digest: record.size_bytes for record in self._sound(await self._rows("WHERE pinned"))}

    async def known(self, digests: Collection[str]) -> dict[str, int]:
        """Return those of the given digests that a LoRA has, with their sizes in bytes."""
        records = self._sound(await self._rows("WHERE digest = ANY(%s)", list(digests)))
        return {record.digest: record.size_bytes for record in records}

    async def names(self, digest: str) -> list[str]:
        """Return the names of all LoRAs with this digest."""
        return [record.name for record in self._sound(await self._rows("WHERE digest = %s ORDER BY name", digest))]

    async def _rows(self, where: str, *parameters: object) -> list[tuple[Any, ...]]:
        return await self._database.fetch(f"SELECT {_COLUMNS} FROM bottega_loras {where}", parameters)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[Connection]:
        async with self._database.transaction() as connection:
            await lock(connection, "loras")
            yield connection

    def _sound(self, rows: Iterable[tuple[Any, ...]]) -> list[CatalogueRecord]:
        found = []
        for name, digest, text in rows:
            try:
                found.append(_read(name, digest, text))
            except DataLoss:
                log_damaged(self._damaged, name, digest)
        return found


class SharedLock:
    """A lock that one task of one store at a time holds. Raises StorageUnavailable if it cannot be had in 60 s."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._own = asyncio.Lock()
        self._held: AsyncExitStack | None = None

    async def __aenter__(self) -> None:
        await self._own.acquire()
        try:
            self._held = await self._acquire()
        except BaseException:
            self._own.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        held, self._held = self._held, None
        assert held is not None
        try:
            # The lock ends with its connection as well.
            with contextlib.suppress(StorageUnavailable):
                await run_to_end(held.aclose())
        finally:
            self._own.release()

    async def _acquire(self) -> AsyncExitStack:
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(self._database.transaction(limit_s=_WAIT_S + _HOLD_S))
            await connection.execute(_BOUNDS.encode())
            await lock(connection, "changes of LoRAs")
            signs = asyncio.create_task(_give_signs(connection))
            stack.push_async_callback(_stop, signs)
            return stack.pop_all()


async def _give_signs(connection: Connection) -> None:
    while True:
        await asyncio.sleep(_SIGN_S)
        await connection.execute("SELECT")


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # the connection has failed, as its release will tell


def _read(name: str, digest: str, text: str) -> CatalogueRecord:
    try:
        return read_description(text.encode(), description_stem(digest, name))
    except DataLoss:
        raise damaged_row(name) from None


async def _get(connection: Connection, name: str) -> CatalogueRecord:
    rows = await rows_of(connection, f"SELECT {_COLUMNS} FROM bottega_loras WHERE name = %s", (name,))
    if not rows:
        raise not_found(name)
    return _read(*rows[0])


async def _write(connection: Connection, record: CatalogueRecord) -> CatalogueRecord:
    await connection.execute(
        "INSERT INTO bottega_loras VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (name) DO UPDATE SET"
        " (digest, base, size_bytes, pinned, description) = "
        "(excluded.digest, excluded.base, excluded.size_bytes, excluded.pinned, excluded.description)",
        (record.name, record.digest, record.base, record.size_bytes, record.pinned, description_of(record).decode()),
    )
    return record
