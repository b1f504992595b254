"""The outbox in the file of the SQLite job store. Its rows have checksums, as those of jobs do."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from bottega.errors import DataLoss
from bottega.gateway.jobs.store.outbox import OutboxEvent, OutboxPlace
from bottega.gateway.jobs.store.sqlite_schema import damaged
from bottega.storage.sqlite_files import Value, checksum

ResultT = TypeVar("ResultT")

_FIELDS = tuple(field.name for field in dataclasses.fields(OutboxEvent))
_COLUMNS = ", ".join(_FIELDS)
_OF_PLACE = tuple(field.name for field in dataclasses.fields(OutboxPlace))
_PLACE = ", ".join(_OF_PLACE)
_REAL = frozenset({"created_wall", "tried_since_steady", "due_steady"})
_INSERT = (
    f"INSERT INTO outbox ({_COLUMNS}, checksum) VALUES ({', '.join('?' * (len(_FIELDS) + 1))}) "
    "ON CONFLICT (event_id) DO NOTHING"
)
_REPLACE = f"UPDATE outbox SET ({_COLUMNS}, checksum) = ({', '.join('?' * (len(_FIELDS) + 1))}) WHERE event_id = ?"


class RunOnConnection(Protocol):
    """Runs an operation on a connection of the job store, in its thread."""

    def __call__(self, operation: Callable[[sqlite3.Connection], ResultT], /) -> Awaitable[ResultT]:
        """Return the result of the operation."""


class SqliteOutbox:
    """An Outbox in the file of a job store.

    Args:
        write: Runs an operation in a group commit, after which its result is durable.
        read: Runs a query.
    """

    def __init__(self, *, write: RunOnConnection, read: RunOnConnection) -> None:
        self._write = write
        self._read = read

    async def places(self, *, after: int, limit: int) -> list[OutboxPlace]:
        """Read where events go and when."""
        query = f"SELECT {_PLACE} FROM outbox WHERE number > ? ORDER BY number LIMIT ?"
        rows = await self._read(lambda connection: connection.execute(query, (after, limit)).fetchall())
        return [OutboxPlace(**{**dict(zip(_OF_PLACE, row, strict=True)), "dead": bool(row[-1])}) for row in rows]

    async def get(self, event_id: str) -> OutboxEvent | None:
        """Read an event."""
        query = f"SELECT {_COLUMNS}, checksum FROM outbox WHERE event_id = ?"
        rows = await self._read(lambda connection: connection.execute(query, (event_id,)).fetchall())
        return _event(rows[0]) if rows else None

    async def put(self, event: OutboxEvent) -> None:
        """Write an event of another store, unless there is one with its ID."""
        await self._write(lambda connection: insert_event(connection, event))

    async def replace(self, event: OutboxEvent) -> bool:
        """Write a changed event."""
        values = (*_row(event), event.event_id)
        return bool(await self._write(lambda connection: connection.execute(_REPLACE, values).rowcount))

    async def remove(self, event_ids: Sequence[str]) -> int:
        """Delete events."""
        marks = ", ".join("?" * len(event_ids))
        query = f"DELETE FROM outbox WHERE event_id IN ({marks})"
        return await self._write(lambda connection: connection.execute(query, tuple(event_ids)).rowcount)

    async def page(
        self, *, tenant: str | None, dead: bool | None, before: int | None, size: int
    ) -> list[tuple[int, OutboxEvent]]:
        """Read events, newest first."""
        wanted: dict[str, Value] = {"tenant = ?": tenant, "dead = ?": dead, "number < ?": before}
        given = {condition: value for condition, value in wanted.items() if value is not None}
        where = " AND ".join(["TRUE", *given])
        query = f"SELECT number, {_COLUMNS}, checksum FROM outbox WHERE {where} ORDER BY number DESC LIMIT ?"
        rows = await self._read(lambda connection: connection.execute(query, (*given.values(), size)).fetchall())
        found = []
        for number, *row in rows:
            try:
                found.append((int(number), _event(row)))
            except DataLoss:
                continue
        return found


def insert_event(connection: sqlite3.Connection, event: OutboxEvent) -> None:
    """Write a new event, unless there is one with its ID."""
    connection.execute(_INSERT, _row(event))


def _row(event: OutboxEvent) -> tuple[Value, ...]:
    values = [_plain(name, getattr(event, name)) for name in _FIELDS]
    return (*values, checksum(values))


def _plain(name: str, value: Any) -> Value:
    if name in _REAL:
        return float(value)
    return int(value) if isinstance(value, bool) else value


def _event(row: Sequence[Any]) -> OutboxEvent:
    *values, expected = row
    if checksum(values) != expected:
        raise damaged()
    fields = dict(zip(_FIELDS, values, strict=True))
    return OutboxEvent(**{**fields, "dead": bool(fields["dead"])})
