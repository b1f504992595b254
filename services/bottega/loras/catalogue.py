"""The catalogue of LoRAs in one SQLite file: name, base, digest and the rest.

One thread does all of it, on a connection of its own; a change is on the disk when its call returns. A row that is not
what was written is left out, told of in the log, and stays until its LoRA is brought again or back.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from bottega.errors import DataLoss, LoraExists, LoraNotFound, TooLarge
from bottega.loras.catalogue_rows import COLUMNS, from_row, to_row
from bottega.loras.catalogue_schema import INSERT, SCHEMA
from bottega.loras.records import CatalogueRecord
from bottega.storage import SqliteDatabase
from bottega.storage.checksums import Value

# A name is some hundred bytes of the file: this is a catalogue that is still listed within a second.
_MOST = 100_000
_ALL = f"SELECT {', '.join(COLUMNS)} FROM loras"

_log = logging.getLogger(__name__)


class LoraCatalogue:
    """Open it before anything else. Every method may raise StorageUnavailable, or DataLoss for a damaged file."""

    def __init__(self, path: Path) -> None:
        self._database = SqliteDatabase(path, SCHEMA)
        self._damaged: set[str] = set()  # names, as far as somebody came across them: for the log

    async def open(self) -> None:
        """Creates the file where there is none; a damaged one is kept aside. Raises ConfigError for somebody else's."""
        await self._database.open()

    async def close(self) -> None:
        """Ends after what was begun."""
        await self._database.close()

    async def add(self, record: CatalogueRecord, *, rewords: bool = False) -> CatalogueRecord:
        """Adds a LoRA, and returns it as it is kept: one that is there with the same digest and base stays as it is.

        rewords: such a one gets the trigger words of this record. A damaged row of the name or the digest gives way.
        Raises LoraExists for another one of that name, TooLarge when there are too many.
        """
        return await self._database.transact(lambda connection: self._add(connection, record, rewords))

    async def get(self, name: str) -> CatalogueRecord:
        """Raises LoraNotFound, DataLoss for a damaged row."""
        return await self._database.transact(lambda connection: _get(connection, name))

    async def page(self, *, size: int, after: str, base: str) -> list[CatalogueRecord]:
        """Up to `size` LoRAs whose names come after that one, by name. base: empty is any."""
        return await self._database.transact(lambda connection: self._page(connection, size, after, base))

    async def remove(self, name: str) -> None:
        """Forgets it. Raises LoraNotFound, DataLoss for a damaged row."""
        await self._database.transact(lambda connection: _remove(connection, name))

    async def change(self, name: str, changed: Callable[[CatalogueRecord], CatalogueRecord]) -> CatalogueRecord:
        """Keeps what `changed` makes of its trigger words, bounds and pin. Raises LoraNotFound, DataLoss, and what
        that raises."""
        return await self._database.transact(lambda connection: _change(connection, changed(_get(connection, name))))

    async def all(self) -> list[CatalogueRecord]:
        """Every one."""
        return await self._database.transact(lambda connection: self._records(connection, _ALL))

    async def pinned(self) -> dict[str, int]:
        """Bytes of every digest of which a name is pinned."""
        records = await self._database.transact(lambda connection: self._records(connection, f"{_ALL} WHERE pinned"))
        return {record.digest: record.size_bytes for record in records}

    async def known(self, digests: Collection[str]) -> set[str]:
        """Those of these digests that a LoRA has; a few hundred at most."""
        query = f"{_ALL} WHERE digest IN ({', '.join('?' * len(digests))})"
        records = await self._database.transact(lambda connection: self._records(connection, query, *digests))
        return {record.digest for record in records}

    async def names(self, digest: str) -> list[str]:
        """Names of the LoRAs with that digest."""
        query = f"{_ALL} WHERE digest = ? ORDER BY name"
        return [
            record.name for record in await self._database.transact(lambda found: self._records(found, query, digest))
        ]

    def _records(self, connection: sqlite3.Connection, query: str, *parameters: Value) -> list[CatalogueRecord]:
        return self._sound(connection.execute(query, parameters).fetchall())

    def _page(self, connection: sqlite3.Connection, size: int, after: str, base: str) -> list[CatalogueRecord]:
        """Damaged rows take no place in it, so that it is full where there are enough others."""
        query = f"{_ALL} WHERE name > ? AND (? = '' OR base = ?) ORDER BY name LIMIT ?"
        found: list[CatalogueRecord] = []
        while True:
            rows = connection.execute(query, (after, base, base, size)).fetchall()
            found += self._sound(rows)
            if len(rows) < size or len(found) >= size:
                return found[:size]
            after = rows[-1][0]

    def _sound(self, rows: list[tuple[Any, ...]]) -> list[CatalogueRecord]:
        """The records of those that are what was written."""
        found = []
        for row in rows:
            try:
                found.append(from_row(row))
            except DataLoss:
                self._note(str(row[0]), str(row[1]))
        return found

    def _note(self, name: str, digest: str) -> None:
        if name not in self._damaged:
            self._damaged.add(name)
            what = "what the catalogue says of a LoRA is damaged; it is not served"
            facts = {"lora": name, "digest": digest}
            _log.error(f"{what}: bottega loras rebuild brings it back from its file", extra=facts)

    def _add(self, connection: sqlite3.Connection, record: CatalogueRecord, rewords: bool) -> CatalogueRecord:
        self._make_way(connection, record)
        found = _find(connection, record.name)
        if found is not None:
            if (found.digest, found.base) == (record.digest, record.base):
                return _change(connection, replace(found, trigger_words=record.trigger_words)) if rewords else found
            raise LoraExists(
                f"{record.name} is there already, with other weights or for another base model; remove it first",
                metadata={"loras": record.name, "digest": found.digest, "base": found.base},
            )
        ((count,),) = connection.execute("SELECT count(*) FROM loras")
        if count >= _MOST:
            raise TooLarge(f"the store has {_MOST} LoRAs, as many as it may", metadata={"limit": "loras"})
        connection.execute(INSERT, to_row(record))
        return record

    def _make_way(self, connection: sqlite3.Connection, record: CatalogueRecord) -> None:
        """Drops what is damaged of the name or the digest: the record says it anew. Another name that had the digest
        has its description beside the file."""
        rows = connection.execute(f"{_ALL} WHERE name = ? OR digest = ?", (record.name, record.digest)).fetchall()
        sound = {found.name for found in self._sound(rows)}
        for name, *_ in rows:
            if name not in sound:
                connection.execute("DELETE FROM loras WHERE name = ?", (name,))
                self._damaged.discard(name)


def _get(connection: sqlite3.Connection, name: str) -> CatalogueRecord:
    found = _find(connection, name)
    if found is None:
        raise LoraNotFound(f"the store has no LoRA {name}", metadata={"loras": name})
    return found


def _find(connection: sqlite3.Connection, name: str) -> CatalogueRecord | None:
    row = connection.execute(f"{_ALL} WHERE name = ?", (name,)).fetchone()
    return from_row(row) if row is not None else None


def _remove(connection: sqlite3.Connection, name: str) -> None:
    _get(connection, name)
    connection.execute("DELETE FROM loras WHERE name = ?", (name,))


def _change(connection: sqlite3.Connection, record: CatalogueRecord) -> CatalogueRecord:
    assignments = ", ".join(f"{column} = ?" for column in COLUMNS)
    connection.execute(f"UPDATE loras SET {assignments} WHERE name = ?", (*to_row(record), record.name))
    return record
