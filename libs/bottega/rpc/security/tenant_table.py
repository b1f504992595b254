"""Tenants in a PostgreSQL database, which all gateways read that have its URL as `tenants`.

`bottega tenants` writes the table. A gateway only reads it: its user needs SELECT on it and on bottega_migrations.
Other rights are for those who manage tenants, because a writer can create keys. Each row has a tenant as the file of
tenants has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from bottega.errors import ConfigError
from bottega.rpc.security.tenant_file import Tenant, parsed_tenants
from bottega.storage.postgresql import Migration, PostgresDatabase, lock, refuse_password, rows_of

CHANNEL = "bottega_tenants"
"""Channel of the notifications of changes."""
_COMPONENT = "tenants"
_MIGRATIONS = (
    Migration(
        statements="""
        CREATE TABLE tenants (
            name text PRIMARY KEY,
            document jsonb NOT NULL,
            -- A greater number for each change.
            revision bigint NOT NULL GENERATED ALWAYS AS IDENTITY
        )
        """
    ),
)
_ALL = "SELECT document FROM tenants ORDER BY name"
_WRITE = """
    INSERT INTO tenants VALUES (%s, %s::jsonb) ON CONFLICT (name)
    DO UPDATE SET document = excluded.document, revision = DEFAULT
"""

ResultT = TypeVar("ResultT")


class TenantTable:
    """The table of tenants in a database, for gateways.

    Args:
        url: The URL of the database.
        application: Name that PostgreSQL shows for its connection.
    """

    def __init__(self, url: str, *, application: str) -> None:
        self.database = PostgresDatabase(url, application=application, max_connections=1)
        self._seen: tuple[int, int] | None = None

    async def read_changed(self) -> tuple[Tenant, ...] | None:
        """Return all tenants; None if none has changed since the last call. Connect if there is no connection.

        Raises:
            ConfigError: If there are no tenants in the database, or one cannot be used.
            StorageUnavailable: If the database cannot be reached now.
        """
        await self.database.open()
        if self._seen is None and not await self.has_tenants():
            raise ConfigError(
                f"the database {self.database.place} has no tenants; add one with: bottega tenants add NAME --file URL"
            )
        ((number, newest),) = await self.database.fetch("SELECT count(*), coalesce(max(revision), 0) FROM tenants")
        state = int(number), int(newest)
        if state == self._seen:
            return None
        tenants = _tenants(await self.database.fetch(_ALL), self.database.place)
        self._seen = state
        return tenants

    async def has_tenants(self) -> bool:
        """Return whether there are tenants in the database. Raises ConfigError if its user may not read them."""
        await self.database.open()
        if not await self.database.has_schema(_COMPONENT, _MIGRATIONS):
            return False
        with self.database.rights('GRANT SELECT ON tenants TO "USER"'):
            return bool(await self.database.fetch("SELECT 1 FROM tenants LIMIT 1"))


def read_table(url: str) -> tuple[Tenant, ...]:
    """Return the tenants in a database, for a command. Raises ConfigError and StorageUnavailable."""

    async def read(database: PostgresDatabase) -> tuple[Tenant, ...]:
        if not await database.has_schema(_COMPONENT, _MIGRATIONS):
            return ()
        with database.rights('GRANT SELECT ON tenants TO "USER"'):
            return _tenants(await database.fetch(_ALL), database.place)

    return _run(url, read)


def change_table(url: str, change: Callable[[tuple[Tenant, ...]], tuple[Tenant, ...]]) -> None:
    """Change the tenants in a database in one transaction, and tell the gateways. Creates a missing table.

    Args:
        url: The URL of the database.
        change: Returns the new tenants, given the old ones. If it raises, nothing is changed.
    """

    async def write(database: PostgresDatabase) -> None:
        await database.migrate(_COMPONENT, _MIGRATIONS)
        with database.rights('GRANT SELECT, INSERT, UPDATE, DELETE ON tenants TO "USER"'):
            async with database.transaction() as connection:
                await lock(connection, "tenants")
                before = _tenants(await rows_of(connection, _ALL), database.place)
                after = change(before)
                documents = [dataclasses.asdict(tenant) for tenant in after]
                parsed_tenants({"tenants": documents}, source="the new tenants")  # dataclasses.replace checks nothing
                for tenant, document in zip(after, documents, strict=True):
                    if tenant not in before:
                        await connection.execute(_WRITE, (tenant.name, json.dumps(document)))
                removed = {tenant.name for tenant in before} - {tenant.name for tenant in after}
                await connection.execute("DELETE FROM tenants WHERE name = ANY(%s)", (sorted(removed),))
                await connection.execute("SELECT pg_notify(%s, '')", (CHANNEL,))

    _run(url, write)


def _run(url: str, work: Callable[[PostgresDatabase], Awaitable[ResultT]]) -> ResultT:
    refuse_password(url)

    async def run() -> ResultT:
        database = PostgresDatabase(url, application="bottega tenants", max_connections=1)
        try:
            await database.open()
            return await work(database)
        finally:
            await database.close()

    return asyncio.run(run())


def _tenants(rows: list[tuple[object, ...]], place: str) -> tuple[Tenant, ...]:
    return parsed_tenants({"tenants": [document for (document,) in rows]}, source=f"the tenants in {place}")
