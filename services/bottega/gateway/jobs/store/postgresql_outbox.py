"""The outbox in the database of the PostgreSQL job store."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from bottega.gateway.jobs.store.outbox import OutboxEvent, OutboxPlace
from bottega.storage.postgresql import Connection, lock, rows_of

Transaction = Callable[[], contextlib.AbstractAsyncContextManager[Connection]]
"""A function that returns a context manager, whose block is a transaction of the job store."""

_FIELDS = tuple(field.name for field in dataclasses.fields(OutboxEvent))
_COLUMNS = ", ".join(_FIELDS)
_MARKS = ", ".join(["%s"] * len(_FIELDS))
_OF_PLACE = tuple(field.name for field in dataclasses.fields(OutboxPlace))
_PLACE = ", ".join(_OF_PLACE)


class PostgresOutbox:
    """An Outbox in the database of a job store.

    Args:
        write: Returns a context manager, whose block may write.
        read: The same for a block that only reads.
    """

    def __init__(self, *, write: Transaction, read: Transaction) -> None:
        self._write = write
        self._read = read

    async def places(self, *, after: int, limit: int) -> list[OutboxPlace]:
        """Read where events go and when."""
        query = f"SELECT {_PLACE} FROM outbox WHERE number > %s ORDER BY number LIMIT %s"
        async with self._read() as connection:
            rows = await rows_of(connection, query, (after, limit))
        return [OutboxPlace(**dict(zip(_OF_PLACE, row, strict=True))) for row in rows]

    async def get(self, event_id: str) -> OutboxEvent | None:
        """Read an event."""
        async with self._read() as connection:
            rows = await rows_of(connection, f"SELECT {_COLUMNS} FROM outbox WHERE event_id = %s", (event_id,))
        return _event(rows[0]) if rows else None

    async def put(self, event: OutboxEvent) -> None:
        """Write an event of another store, unless there is one with its ID."""
        async with self._write() as connection:
            await insert_event(connection, event)

    async def replace(self, event: OutboxEvent) -> bool:
        """Write a changed event."""
        query = f"UPDATE outbox SET ({_COLUMNS}) = ({_MARKS}) WHERE event_id = %s RETURNING number"
        async with self._write() as connection:
            return bool(await rows_of(connection, query, (*_row(event), event.event_id)))

    async def remove(self, event_ids: Sequence[str]) -> int:
        """Delete events."""
        query = "DELETE FROM outbox WHERE event_id = ANY(%s) RETURNING number"
        async with self._write() as connection:
            return len(await rows_of(connection, query, (list(event_ids),)))

    async def page(
        self, *, tenant: str | None, dead: bool | None, before: int | None, size: int
    ) -> list[tuple[int, OutboxEvent]]:
        """Read events, newest first."""
        wanted: dict[str, Any] = {"tenant = %s": tenant, "dead = %s": dead, "number < %s": before}
        given = {condition: value for condition, value in wanted.items() if value is not None}
        where = " AND ".join(["TRUE", *given])
        query = f"SELECT number, {_COLUMNS} FROM outbox WHERE {where} ORDER BY number DESC LIMIT %s"
        async with self._read() as connection:
            rows = await rows_of(connection, query, (*given.values(), size))
        return [(int(number), _event(row)) for number, *row in rows]


async def insert_event(connection: Connection, event: OutboxEvent) -> None:
    """Write a new event, unless there is one with its ID. Call it last in a transaction.

    Events are written by one transaction at a time. So their numbers become visible in order, and a reader that asks
    for numbers above the last one that it has seen misses none.
    """
    await lock(connection, "outbox")
    query = f"INSERT INTO outbox ({_COLUMNS}) VALUES ({_MARKS}) ON CONFLICT (event_id) DO NOTHING"
    await connection.execute(query.encode(), _row(event))


def _row(event: OutboxEvent) -> tuple[Any, ...]:
    return tuple(getattr(event, name) for name in _FIELDS)


def _event(row: Sequence[Any]) -> OutboxEvent:
    return OutboxEvent(**dict(zip(_FIELDS, row, strict=True)))
