"""The tables of PostgreSQL in which caches with the same objects share their records.

Each entry has an owner, the name of the cache that answers for it. Workers ask the first cache in the order of its
place (`placement_key`, `rank_stores`), and that one owns it: when caches join or leave, the others become owners of
their share, in the transaction in which they learn it. What a cache writes about entries that it does not own any more
has no effect, and nothing that it writes has any after another one has taken its name.

Import this module only where a database is configured: it needs the extra `postgresql`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from bottega.addons.interface.store_link import rank_stores
from bottega.blobstore.records import RecordChanges, StoredRecord, StoredRow
from bottega.cache.index.vector_table import forget_vectors
from bottega.cache.latent import EntryRecord
from bottega.cache.records import SCHEMA, latent_name, new_rows, picture_name, read_entry
from bottega.errors import ConfigError
from bottega.storage import os_errors
from bottega.storage.objects import ObjectStore
from bottega.storage.postgresql import Connection, Migration, PostgresDatabase, lock, rows_of

LIFE_S = 30.0
"""Seconds after the last renewal of its registration for which a cache keeps its entries. A restart takes less."""

# Caches that are gone for so long are forgotten, with their embeddings.
_FORGET_S = 3600.0
# Upper bound on a transaction in which entries change their owner, and on the wait for that of another cache.
_MOVE_S = 300.0
_MOVING = f"""
    SET LOCAL statement_timeout = '{_MOVE_S:.0f}s'; SET LOCAL lock_timeout = '{_MOVE_S:.0f}s';
    SET LOCAL idle_in_transaction_session_timeout = '{_MOVE_S:.0f}s'"""

_MIGRATIONS = (
    Migration(
        statements="""
        CREATE TABLE bottega_caches (
            objects text NOT NULL, name text NOT NULL, id text NOT NULL, stopped boolean NOT NULL,
            used_bytes bigint NOT NULL, seen timestamptz NOT NULL, PRIMARY KEY (objects, name));
        CREATE TABLE bottega_cache_entries (
            objects text NOT NULL, owner text NOT NULL, place text NOT NULL, number bigint PRIMARY KEY,
            name text NOT NULL UNIQUE, key text NOT NULL, model_hash text NOT NULL, dtype integer NOT NULL,
            shape text NOT NULL, picture_height integer NOT NULL, picture_width integer NOT NULL,
            picture_digest bytea NOT NULL, recorded_s double precision NOT NULL, embedding bytea NOT NULL,
            parameters bytea NOT NULL, checksum bigint NOT NULL, hits bigint NOT NULL);
        CREATE INDEX bottega_cache_entries_owner ON bottega_cache_entries (objects, owner, number);
        CREATE INDEX bottega_cache_entries_place ON bottega_cache_entries (objects, place);
        CREATE TABLE bottega_cache_latents (
            number bigint NOT NULL REFERENCES bottega_cache_entries ON DELETE CASCADE, step integer NOT NULL,
            digest bytea NOT NULL, checksum bigint NOT NULL, frequency double precision NOT NULL,
            used_at double precision NOT NULL, created_at double precision NOT NULL, PRIMARY KEY (number, step));
        CREATE TABLE bottega_cache_profiles (
            objects text NOT NULL, model_hash text NOT NULL, profile bytea NOT NULL, PRIMARY KEY (objects, model_hash))
        """
    ),
    Migration(statements="CREATE TABLE bottega_cache_objects (objects text PRIMARY KEY, id text NOT NULL)"),
)
OWNER_NAMES = re.compile(r"[0-9a-f]{32}")
"""Names of the objects that name the database."""
_ENTRIES, _LATENTS = SCHEMA.records, SCHEMA.parts
_OWN = "bottega_cache_entries.objects = %(objects)s AND bottega_cache_entries.owner = %(name)s"


class SharedRecords:
    """The records of the caches that share objects, as one of them sees them. Call `open` first.

    Every method may raise StorageUnavailable, and DataLoss if the tables were changed.

    Args:
        objects: Address of the objects: caches with the same one share the records.
        name: Name of this cache in the fleet.
        cache: ID of this cache's folder, which tells it from another one of the same name.
    """

    def __init__(self, database: PostgresDatabase, *, objects: str, name: str, cache: str) -> None:
        self._database = database
        self._is_open = False
        self._me = {"objects": objects, "name": name, "id": cache, "life": LIFE_S}

    async def open(self) -> None:
        """Connect and create the tables. Raises ConfigError if rights or version are wrong. It may be repeated."""
        if not self._is_open:
            await self._database.open()
            await self._database.migrate("records of the approximate cache", _MIGRATIONS)
            self._is_open = True

    async def owner_id(self) -> str:
        """Return the random ID that this database has for the objects. It tells whose they are."""
        await self.open()
        query = (
            "INSERT INTO bottega_cache_objects VALUES (%(objects)s, replace(gen_random_uuid()::text, '-', ''))"
            " ON CONFLICT (objects) DO UPDATE SET objects = excluded.objects RETURNING id"
        )
        ((found,),) = await self._database.fetch(query, self._me)
        return str(found)

    async def give_sign(self, used_bytes: int) -> dict[str, int]:
        """Note that this cache lives, and return the bytes of all living caches by name.

        It is not among them if it was thought to be gone: then it has to `join` again.
        """
        query = (
            "WITH me AS (UPDATE bottega_caches SET seen = now(), used_bytes = %(used)s WHERE objects = %(objects)s AND"
            " name = %(name)s AND id = %(id)s AND seen > now() - %(life)s * interval '1 s' RETURNING name, used_bytes)"
            " SELECT name, used_bytes FROM bottega_caches WHERE objects = %(objects)s AND name <> %(name)s"
            " AND seen > now() - %(life)s * interval '1 s' UNION ALL SELECT name, used_bytes FROM me"
        )
        return dict(await self._database.fetch(query, self._me | {"used": used_bytes}))

    async def join(self) -> set[str]:
        """Become the owner of this cache's share of the entries, and return the names of all living caches.

        Raises StorageUnavailable if another cache has this name.
        """
        await self.open()
        async with self._database.transaction(limit_s=_MOVE_S) as connection:
            await connection.execute(_MOVING.encode())
            await lock(connection, f"owners of cached latents in {self._me['objects']}")
            found = await rows_of(
                connection,
                "INSERT INTO bottega_caches VALUES (%(objects)s, %(name)s, %(id)s, false, 0, now())"
                " ON CONFLICT (objects, name) DO UPDATE SET id = excluded.id, stopped = false, seen = excluded.seen"
                " WHERE bottega_caches.id = excluded.id OR bottega_caches.stopped"
                " OR bottega_caches.seen <= now() - %(life)s * interval '1 s' RETURNING 1",
                self._me,
            )
            if not found:
                text = f"another cache with these objects is named {self._me['name']}: give each a name of its own"
                raise os_errors.unavailable(text, cause=os_errors.BUSY)
            query = (
                "SELECT name FROM bottega_caches WHERE objects = %(objects)s"
                " AND seen > now() - %(life)s * interval '1 s'"
            )
            names = {name for (name,) in await rows_of(connection, query, self._me)}
            await self._own_share(connection, names)
        return names

    async def forget_caches(self) -> None:
        """Delete the embeddings of caches that are gone for long; those that have their entries have copies."""
        where = f"objects = %(objects)s AND seen < now() - interval '{_FORGET_S:.0f} s'"
        for (cache,) in await self._database.fetch(f"SELECT id FROM bottega_caches WHERE {where}", self._me):
            await forget_vectors(self._database, cache)
            await self._database.fetch(
                f"DELETE FROM bottega_caches WHERE {where} AND id = %(gone)s", self._me | {"gone": cache}
            )

    async def leave(self) -> None:
        """Free the name now. Ownership of entries lasts for 30 s, enough for a restart."""
        query = (
            "UPDATE bottega_caches SET stopped = true WHERE objects = %(objects)s AND name = %(name)s AND id = %(id)s"
        )
        await self._database.fetch(query, self._me)

    async def numbers(self) -> dict[int, str]:
        """Return the keys of this cache's entries, by number."""
        return dict(await self._database.fetch(f"SELECT number, key FROM bottega_cache_entries WHERE {_OWN}", self._me))

    async def read(self, numbers: Collection[int]) -> tuple[list[EntryRecord], list[int]]:
        """Return the own ones of these entries, sorted by key, and the numbers of useless ones.

        An entry that is damaged, or has no latents, is useless.
        """
        columns = ", ".join(_ENTRIES.columns)
        query = f"SELECT place, {columns} FROM bottega_cache_entries WHERE number = ANY(%(numbers)s)"
        given = self._me | {"numbers": list(numbers)}
        rows = await self._database.fetch(f"{query} AND {_OWN} ORDER BY key, number", given)
        query = f"SELECT {', '.join(_LATENTS.columns)} FROM bottega_cache_latents WHERE number = ANY(%(numbers)s)"
        by_number: dict[int, list[StoredRow]] = {}
        for part in map(_LATENTS.stored, await self._database.fetch(query, given)):
            by_number.setdefault(part.key[0], []).append(part)
        found, useless = [], []
        for place, row in ((values[0], _ENTRIES.stored(values[1:])) for values in rows):
            own = tuple(part for part in by_number.get(row.key[0], ()) if part.intact)
            if row.intact and own:
                found.append(read_entry(StoredRecord(row=row, parts=own, shared=lambda _: None), place))
            else:
                useless.append(row.key[0])
        return found, useless

    async def parameters(self, numbers: Collection[int]) -> dict[int, bytes]:
        """Return the serialized parameters of existing entries, by number."""
        query = "SELECT number, parameters FROM bottega_cache_entries WHERE number = ANY(%s)"
        return dict(await self._database.fetch(query, (list(numbers),)))

    async def write(self, changes: RecordChanges, records: Collection[EntryRecord]) -> None:
        """Write changes of own entries, and new entries, in one transaction.

        Raises StorageUnavailable if another cache has this one's name meanwhile.
        """
        rows = new_rows(records)
        places = {record.entry.number: record.entry.place for record in records}
        async with self._database.transaction() as connection:
            query = (
                "SELECT 1 FROM bottega_caches WHERE objects = %(objects)s AND name = %(name)s AND id = %(id)s FOR SHARE"
            )
            if not await rows_of(connection, query, self._me):
                raise os_errors.unavailable("another cache has taken this one's name", cause=os_errors.BUSY)
            async with connection.pipeline():
                await self._change(connection, changes)
                await _insert(
                    connection,
                    "bottega_cache_entries",
                    ["objects", "owner", "place", *_ENTRIES.columns],
                    [
                        (self._me["objects"], self._me["name"], places[int(str(row[0][0]))], *_ENTRIES.values(row))
                        for row in rows.records
                    ],
                )
                await _insert(
                    connection, "bottega_cache_latents", _LATENTS.columns, list(map(_LATENTS.values, rows.parts))
                )

    async def exchange_profiles(self, own: Mapping[str, bytes]) -> dict[str, bytes]:
        """Add profiles of models that have none, and return the profiles of all models. All are serialized."""
        add = (
            "INSERT INTO bottega_cache_profiles SELECT %(objects)s, * FROM"
            " unnest(%(models)s::text[], %(profiles)s::bytea[]) ON CONFLICT DO NOTHING"
        )
        read = "SELECT model_hash, profile FROM bottega_cache_profiles WHERE objects = %(objects)s"
        await self._database.fetch(add, self._me | {"models": list(own), "profiles": list(own.values())})
        return dict(await self._database.fetch(read, self._me))

    async def set_profile(self, model_hash: str, profile: bytes) -> None:
        """Replace the profile of a model for all caches."""
        query = (
            "INSERT INTO bottega_cache_profiles VALUES (%(objects)s, %(model)s, %(profile)s)"
            " ON CONFLICT (objects, model_hash) DO UPDATE SET profile = excluded.profile"
        )
        await self._database.fetch(query, self._me | {"model": model_hash, "profile": profile})

    async def recorded(self, names: Collection[str]) -> set[str]:
        """Return those of these names of files that a record of any cache has."""
        entries = {name[:32] for name in names}
        query = (
            "SELECT name, step FROM bottega_cache_entries JOIN bottega_cache_latents USING (number)"
            " WHERE name = ANY(%s)"
        )
        rows = await self._database.fetch(query, (list(entries),))
        return {latent_name(name, step) for name, step in rows} | {picture_name(name) for name, _ in rows}

    async def _own_share(self, connection: Connection, names: Iterable[str]) -> None:
        others = "SELECT DISTINCT place FROM bottega_cache_entries WHERE objects = %(objects)s AND owner <> %(name)s"
        places = [place for (place,) in await rows_of(connection, others, self._me)]
        own = [place for place in places if rank_stores(names, place)[0] == self._me["name"]]
        if own:
            await connection.execute(
                b"UPDATE bottega_cache_entries SET owner = %(name)s"
                b" WHERE objects = %(objects)s AND owner <> %(name)s AND place = ANY(%(own)s)",
                self._me | {"own": own},
            )

    async def _change(self, connection: Connection, changes: RecordChanges) -> None:
        if changes.gone:
            query = f"DELETE FROM bottega_cache_entries WHERE number = ANY(%(gone)s) AND {_OWN}"
            await connection.execute(query.encode(), self._me | {"gone": list(changes.gone)})
        if changes.gone_parts:
            numbers, steps = map(list, zip(*changes.gone_parts, strict=True))
            query = (
                "DELETE FROM bottega_cache_latents USING bottega_cache_entries,"
                " unnest(%(numbers)s::bigint[], %(steps)s::integer[]) AS gone (number, step)"
                " WHERE bottega_cache_latents.number = gone.number AND bottega_cache_latents.step = gone.step"
                f" AND bottega_cache_entries.number = gone.number AND {_OWN}"
            )
            await connection.execute(query.encode(), self._me | {"numbers": numbers, "steps": steps})
        if changes.uses:
            query = (
                "UPDATE bottega_cache_entries SET hits = used.hits"
                " FROM unnest(%(numbers)s::bigint[], %(hits)s::bigint[]) AS used (number, hits)"
                f" WHERE bottega_cache_entries.number = used.number AND {_OWN}"
            )
            hits = [use[0] for use in changes.uses.values()]
            await connection.execute(query.encode(), self._me | {"numbers": list(changes.uses), "hits": hits})
        if changes.part_uses:
            rows = [(*key, *use) for key, use in changes.part_uses.items()]
            numbers, steps, frequency, used, created = map(list, zip(*rows, strict=True))
            query = (
                "UPDATE bottega_cache_latents SET (frequency, used_at, created_at) ="
                " (used.frequency, used.used_at, used.created_at) FROM bottega_cache_entries,"
                " unnest(%(numbers)s::bigint[], %(steps)s::integer[], %(frequency)s::float8[], %(used)s::float8[],"
                " %(created)s::float8[]) AS used (number, step, frequency, used_at, created_at)"
                " WHERE bottega_cache_latents.number = used.number AND bottega_cache_latents.step = used.step"
                f" AND bottega_cache_entries.number = used.number AND {_OWN}"
            )
            values = {"numbers": numbers, "steps": steps, "frequency": frequency, "used": used, "created": created}
            await connection.execute(query.encode(), self._me | values)


def claim_objects(owner: ObjectStore, own: str, place: str) -> None:
    """Note in the bucket that its objects belong to a database, or raise ConfigError if they belong to another one.

    Caches delete objects that have no record in their database, so two databases with one prefix would lose both.

    Args:
        owner: A store whose names match OWNER_NAMES.
        own: ID of the database; see SharedRecords.owner_id.
        place: Host, port and name of the database.
    """
    found = {file.name for file in owner.objects()}
    if not found:
        owner.write(own, place.encode())
        found = {file.name for file in owner.objects()}
        if found - {own}:  # two databases at once
            owner.remove([own])
    if found - {own}:
        raise ConfigError(
            f"objects: the prefix belongs to caches of another database than {place}: choose another prefix or, if that"
            f" database is gone, delete owner/ below it ({', '.join(sorted(found - {own}))})"
        )


async def _insert(connection: Connection, table: str, columns: list[str], rows: list[tuple[object, ...]]) -> None:
    if rows:
        places = ", ".join(["%s"] * len(columns))
        statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({places})"
        await connection.cursor().executemany(statement.encode(), rows)
