"""The catalogue of LoRAs in one SQLite file: a record with name, base model, digest and other properties of each LoRA.

One thread makes all calls to SQLite, on its own connection. A change is durable when its call returns. A damaged row is
skipped and logged. It stays in the file until its LoRA is uploaded again or restored.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path

from bottega.blobstore.records import StoredRow
from bottega.errors import DataLoss, LoraExists, LoraNotFound, TooLarge
from bottega.loras.records import LORAS, CatalogueRecord, read_row, values_of
from bottega.storage import SqliteDatabase, SqliteSchema
from bottega.storage.sqlite_files import Value

SCHEMA = SqliteSchema(
    what="the catalogue of LoRAs",
    # "BtLo".
    application_id=0x42744C6F,
    version=4,
    tables=(LORAS.statement, "CREATE INDEX loras_digest ON loras (digest)"),
    remedy="restore it from the LoRAs' files with bottega loras rebuild",
)

# Upper bound on the LoRAs. A row takes some hundred bytes; so many are still listed within a second.
MAX_LORAS = 100_000

_log = logging.getLogger(__name__)


class LoraCatalogue:
    """The catalogue of a store's LoRAs: a record for each name.

    Call `open` first. Every method may raise StorageUnavailable, or DataLoss for a damaged file.
    """

    def __init__(self, path: Path) -> None:
        self._database = SqliteDatabase(path, SCHEMA)
        self._damaged: set[str] = set()  # names of damaged rows that have been logged
        self.write_lock = asyncio.Lock()
        """Held while the catalogue and files are changed together."""

    async def open(self) -> None:
        """Open the file; create it if it is missing, and move a damaged one aside.

        Raises ConfigError for a SQLite file of another program.
        """
        await self._database.open()

    async def close(self) -> None:
        """Close the file after the calls that have begun."""
        await self._database.close()

    async def add(self, record: CatalogueRecord, *, rewords: bool = False) -> CatalogueRecord:
        """Add a LoRA, and return its record.

        A LoRA of the same name, digest and base model stays as it is. Damaged rows of the name or the digest are
        replaced. Raises LoraExists for another LoRA of that name, TooLarge if the catalogue is full.

        Args:
            rewords: Whether to replace the trigger words of a LoRA that stays as it is.
        """
        return await self._database.transact(lambda connection: self._add(connection, record, rewords))

    async def get(self, name: str) -> CatalogueRecord:
        """Return the LoRA with a name. Raises LoraNotFound, and DataLoss for a damaged row."""
        return await self._database.transact(lambda connection: _get(connection, name))

    async def page(self, *, size: int, after: str, base: str) -> list[CatalogueRecord]:
        """Return up to `size` LoRAs sorted by name, from after the name `after`. `base` "" means any base model."""
        return await self._database.transact(lambda connection: self._page(connection, size, after, base))

    async def remove(self, name: str) -> None:
        """Delete the row of a LoRA. Raises LoraNotFound, and DataLoss for a damaged row."""
        await self._database.transact(lambda connection: _remove(connection, name))

    async def change(self, name: str, changed: Callable[[CatalogueRecord], CatalogueRecord]) -> CatalogueRecord:
        """Replace a LoRA's record with the result of `changed`, which must have the same name. Return the new record.

        Raises LoraNotFound, DataLoss, and the errors of `changed`.
        """
        return await self._database.transact(lambda connection: _write(connection, changed(_get(connection, name))))

    async def all(self) -> list[CatalogueRecord]:
        """Return all LoRAs."""
        return await self._database.transact(lambda connection: self._records(connection, ""))

    async def pinned(self) -> dict[str, int]:
        """Return the digests of all pinned LoRAs, with their sizes in bytes."""
        records = await self._database.transact(lambda connection: self._records(connection, "WHERE pinned"))
        return {record.digest: record.size_bytes for record in records}

    async def known(self, digests: Collection[str]) -> dict[str, int]:
        """Return those of the given digests that a LoRA has, with their sizes in bytes. Pass a few hundred at most."""
        query = f"WHERE digest IN ({', '.join('?' * len(digests))})"
        records = await self._database.transact(lambda connection: self._records(connection, query, *digests))
        return {record.digest: record.size_bytes for record in records}

    async def names(self, digest: str) -> list[str]:
        """Return the names of all LoRAs with this digest."""
        query = "WHERE digest = ? ORDER BY name"
        return [
            record.name for record in await self._database.transact(lambda found: self._records(found, query, digest))
        ]

    def _records(self, connection: sqlite3.Connection, query: str, *parameters: Value) -> list[CatalogueRecord]:
        return self._sound(LORAS.read(connection, query, parameters))

    def _page(self, connection: sqlite3.Connection, size: int, after: str, base: str) -> list[CatalogueRecord]:
        """Return a page of LoRAs. Damaged rows do not count, so that the page is full if there are enough others."""
        query = "WHERE name > ? AND (? = '' OR base = ?) ORDER BY name LIMIT ?"
        found: list[CatalogueRecord] = []
        while True:
            rows = list(LORAS.read(connection, query, (after, base, base, size)))
            found += self._sound(rows)
            if len(rows) < size or len(found) >= size:
                return found[:size]
            after = rows[-1].key[0]

    def _sound(self, rows: Iterable[StoredRow]) -> list[CatalogueRecord]:
        found = []
        for row in rows:
            try:
                found.append(read_row(row))
            except DataLoss:
                log_damaged(self._damaged, str(row.values[0]), str(row.values[1]))
        return found

    def _add(self, connection: sqlite3.Connection, record: CatalogueRecord, rewords: bool) -> CatalogueRecord:
        self._delete_damaged(connection, record)
        found = _find(connection, record.name)
        if found is not None:
            if (found.digest, found.base) == (record.digest, record.base):
                return _write(connection, replace(found, trigger_words=record.trigger_words)) if rewords else found
            raise exists_otherwise(found)
        ((count,),) = connection.execute("SELECT count(*) FROM loras")
        if count >= MAX_LORAS:
            raise too_many_loras_error()
        _write(connection, record)
        return record

    def _delete_damaged(self, connection: sqlite3.Connection, record: CatalogueRecord) -> None:
        """Delete damaged rows with the record's name or digest, because the record replaces them.

        If another LoRA had that digest, it can be restored from the description beside its file.
        """
        rows = list(LORAS.read(connection, "WHERE name = ? OR digest = ?", (record.name, record.digest)))
        sound = {found.name for found in self._sound(rows)}
        damaged = [row.key for row in rows if row.key[0] not in sound]
        LORAS.delete(connection, damaged)
        self._damaged.difference_update(name for (name,) in damaged)


def log_damaged(logged: set[str], name: str, digest: str) -> None:
    """Log a damaged row, unless its name is in `logged` already."""
    if name not in logged:
        logged.add(name)
        _log.error(
            "the catalogue's row of a LoRA is damaged, and the LoRA is not served: bottega loras rebuild restores "
            "it from its file",
            extra={"lora": name, "digest": digest},
        )


def not_found(name: str) -> LoraNotFound:
    """Return the error for a name without a LoRA."""
    return LoraNotFound(f"the store has no LoRA {name}", metadata={"loras": name})


def exists_otherwise(found: CatalogueRecord) -> LoraExists:
    """Return the error for a name that another LoRA has."""
    return LoraExists(
        f"{found.name} exists already with other weights or for another base model; remove it first",
        metadata={"loras": found.name, "digest": found.digest, "base": found.base},
    )


def too_many_loras_error() -> TooLarge:
    """Return the error for one LoRA too many."""
    return TooLarge(f"the store is full: it has {MAX_LORAS} LoRAs, the maximum", metadata={"limit": "loras"})


def _get(connection: sqlite3.Connection, name: str) -> CatalogueRecord:
    found = _find(connection, name)
    if found is None:
        raise not_found(name)
    return found


def _find(connection: sqlite3.Connection, name: str) -> CatalogueRecord | None:
    return next((read_row(row) for row in LORAS.read(connection, "WHERE name = ?", (name,))), None)


def _remove(connection: sqlite3.Connection, name: str) -> None:
    _get(connection, name)
    LORAS.delete(connection, [(name,)])


def _write(connection: sqlite3.Connection, record: CatalogueRecord) -> CatalogueRecord:
    LORAS.add(connection, [(values_of(record), ())])
    return record
