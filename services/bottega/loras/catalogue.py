"""The catalogue of LoRAs in one SQLite file: name, base, digest and the rest. Knows nothing of their weights.

One thread does all of it, on a connection of its own; a change is on the disk when its call returns.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from bottega.errors import ConfigError, DataLoss, LoraExists, LoraNotFound, TooLarge
from bottega.loras.records import LoraRecord
from bottega.process import open_files
from bottega.storage import StorageThread, faults, folders

ResultT = TypeVar("ResultT")

# "BtLo": what PRAGMA application_id says of a file of ours.
APPLICATION_ID = 0x42744C6F
VERSION = 1
# A name is some hundred bytes of the file: this is a catalogue that is still listed within a second.
_MOST = 100_000
_BUSY_TIMEOUT_S = 5.0
# Primary result codes, https://sqlite.org/rescode.html; extended ones carry them in their low byte.
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_COLUMNS = "name, digest, base, rank, modules, size_bytes, text_bytes, trigger_words, format, bounds, pinned, added_s"
_TABLES = (
    """
    CREATE TABLE loras (
        name TEXT PRIMARY KEY,
        digest TEXT NOT NULL,
        base TEXT NOT NULL,
        rank INTEGER NOT NULL,
        modules INTEGER NOT NULL,
        size_bytes INTEGER NOT NULL,
        text_bytes INTEGER NOT NULL,
        trigger_words TEXT NOT NULL,
        format TEXT NOT NULL,
        bounds TEXT NOT NULL,
        pinned INTEGER NOT NULL,
        added_s REAL NOT NULL
    ) STRICT, WITHOUT ROWID
    """,
    "CREATE INDEX loras_digest ON loras (digest)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)


class Catalogue:
    """Open it before anything else. Every method may raise StorageUnavailable, or DataLoss for a damaged file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = StorageThread("lora-catalogue")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Creates the file where there is none. Raises ConfigError for somebody else's."""
        await self._thread.run(self._open)

    async def close(self) -> None:
        """Ends after what was begun."""
        await self._thread.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def add(self, record: LoraRecord, *, rewords: bool = False) -> LoraRecord:
        """Adds a LoRA, and returns it as it is kept: one that is there with the same digest and base stays as it is.

        rewords: such a one gets the trigger words of this record.
        Raises LoraExists for another one of that name, TooLarge when there are too many.
        """
        return await self._run(lambda connection: _add(connection, record, rewords))

    async def get(self, name: str) -> LoraRecord:
        """Raises LoraNotFound."""
        return await self._run(lambda connection: _get(connection, name))

    async def page(self, *, size: int, after: str, base: str) -> list[LoraRecord]:
        """Up to `size` LoRAs whose names come after that one, by name. base: empty is any."""
        return await self._run(lambda connection: _page(connection, size, after, base))

    async def remove(self, name: str) -> None:
        """Forgets it. Raises LoraNotFound."""
        await self._run(lambda connection: _remove(connection, name))

    async def pin(self, name: str, pinned: bool) -> LoraRecord:
        """Raises LoraNotFound."""
        return await self._run(lambda connection: _change(connection, replace(_get(connection, name), pinned=pinned)))

    async def set_bounds(self, name: str, digest: str, bounds: tuple[tuple[int, int], ...]) -> LoraRecord:
        """Raises LoraNotFound, also where the name has another digest now."""
        return await self._run(lambda connection: _set_bounds(connection, name, digest, bounds))

    async def digests(self) -> set[str]:
        """All of them."""
        return await self._run(_digests)

    async def pinned(self) -> dict[str, int]:
        """Bytes of every digest of which a name is pinned."""
        return await self._run(_pinned)

    async def known(self, digests: Collection[str]) -> set[str]:
        """Those of these digests that somebody has; a few hundred may be asked for."""
        return await self._run(lambda connection: _known(connection, tuple(digests)))

    async def names(self, digest: str) -> list[str]:
        """Who has that digest."""
        rows = await self._run(
            lambda connection: connection.execute(
                "SELECT name FROM loras WHERE digest = ? ORDER BY name", (digest,)
            ).fetchall()
        )
        return [name for (name,) in rows]

    async def _run(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        return await self._thread.run(lambda: self._transact(operation))

    def _transact(self, operation: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        if self._connection is None:
            raise faults.unavailable("the catalogue is not open", cause=faults.NOT_OPEN)
        try:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return operation(self._connection)
        except sqlite3.Error as error:
            raise self._typed(error) from error

    def _open(self) -> None:
        with faults.translated():
            folders.make_own(self._path.parent)
            if not self._path.exists():
                os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(self._path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("trusted_schema = OFF", "journal_mode = WAL", "synchronous = FULL"):
                connection.execute(f"PRAGMA {pragma}")
            self._adopt(connection)
        except sqlite3.Error as error:
            connection.close()
            raise self._typed(error) from error
        except ConfigError:
            connection.close()
            raise
        self._connection = connection

    def _adopt(self, connection: sqlite3.Connection) -> None:
        ((application_id,),) = connection.execute("PRAGMA application_id")
        ((version,),) = connection.execute("PRAGMA user_version")
        ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_schema")
        if tables and application_id != APPLICATION_ID:
            raise ConfigError(f"{self._path} is a database, but no catalogue of LoRAs; configure another folder")
        if tables and version != VERSION:
            raise ConfigError(
                f"{self._path} was written by another version of Bottega (schema {version}); run that one"
            )
        if tables:
            return
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _TABLES:
                connection.execute(statement)

    def _typed(self, error: sqlite3.Error) -> Exception:
        code = getattr(error, "sqlite_errorcode", None)
        if code is None:
            return error
        if code & 0xFF in _DAMAGED:
            return DataLoss("the catalogue of LoRAs is damaged; its operator has to look after it")
        if why := open_files.exhausted():
            return open_files.too_many(why)
        return faults.unavailable("the catalogue of LoRAs cannot be read or written now", cause=error.sqlite_errorname)


def _add(connection: sqlite3.Connection, record: LoraRecord, rewords: bool) -> LoraRecord:
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
    connection.execute(f"INSERT INTO loras ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _row(record))
    return record


def _get(connection: sqlite3.Connection, name: str) -> LoraRecord:
    found = _find(connection, name)
    if found is None:
        raise LoraNotFound(f"the store has no LoRA {name}", metadata={"loras": name})
    return found


def _find(connection: sqlite3.Connection, name: str) -> LoraRecord | None:
    row = connection.execute(f"SELECT {_COLUMNS} FROM loras WHERE name = ?", (name,)).fetchone()
    return _record(row) if row is not None else None


def _page(connection: sqlite3.Connection, size: int, after: str, base: str) -> list[LoraRecord]:
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM loras WHERE name > ? AND (? = '' OR base = ?) ORDER BY name LIMIT ?",
        (after, base, base, size),
    )
    return [_record(row) for row in rows]


def _remove(connection: sqlite3.Connection, name: str) -> None:
    _get(connection, name)
    connection.execute("DELETE FROM loras WHERE name = ?", (name,))


def _set_bounds(
    connection: sqlite3.Connection, name: str, digest: str, bounds: tuple[tuple[int, int], ...]
) -> LoraRecord:
    found = _get(connection, name)
    if found.digest != digest:
        raise LoraNotFound(f"{name} has other weights now than those that were measured", metadata={"loras": name})
    return _change(connection, replace(found, bounds=tuple(sorted(bounds))))


def _change(connection: sqlite3.Connection, record: LoraRecord) -> LoraRecord:
    connection.execute(
        "UPDATE loras SET trigger_words = ?, bounds = ?, pinned = ? WHERE name = ?",
        (json.dumps(record.trigger_words), json.dumps(record.bounds), record.pinned, record.name),
    )
    return record


def _digests(connection: sqlite3.Connection) -> set[str]:
    return {digest for (digest,) in connection.execute("SELECT DISTINCT digest FROM loras")}


def _pinned(connection: sqlite3.Connection) -> dict[str, int]:
    rows = connection.execute("SELECT digest, size_bytes FROM loras WHERE pinned")
    return {str(digest): int(size_bytes) for digest, size_bytes in rows}


def _known(connection: sqlite3.Connection, digests: tuple[str, ...]) -> set[str]:
    marks = ", ".join("?" * len(digests))
    rows = connection.execute(f"SELECT DISTINCT digest FROM loras WHERE digest IN ({marks})", digests)
    return {digest for (digest,) in rows}


def _row(record: LoraRecord) -> tuple[object, ...]:
    return (
        record.name,
        record.digest,
        record.base,
        record.rank,
        record.modules,
        record.size_bytes,
        record.text_bytes,
        json.dumps(record.trigger_words),
        record.format,
        json.dumps(record.bounds),
        record.pinned,
        record.added_s,
    )


def _record(row: tuple[Any, ...]) -> LoraRecord:
    try:
        name, digest, base, rank, modules, size_bytes, text_bytes, words, kind, bounds, pinned, added_s = row
        return LoraRecord(
            name=str(name),
            digest=str(digest),
            base=str(base),
            rank=int(rank),
            modules=int(modules),
            size_bytes=int(size_bytes),
            text_bytes=int(text_bytes),
            trigger_words=tuple(json.loads(str(words))),
            format=str(kind),
            bounds=tuple((int(steps), int(bound)) for steps, bound in json.loads(str(bounds))),
            pinned=bool(pinned),
            added_s=float(added_s),
        )
    except (ValueError, TypeError) as error:
        raise DataLoss("a row of the catalogue of LoRAs is damaged; its operator has to look after it") from error
