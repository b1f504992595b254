"""A SQLite file of ours when it is deleted, replaced or truncated while it is open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bottega.errors import StorageUnavailable
from bottega.loras.catalogue import SCHEMA as LORAS
from bottega.storage import SqliteDatabase, SqliteSchema
from tests.support import lost_files

SCHEMA = SqliteSchema(
    what="the list of numbers",
    application_id=0x42744E75,
    version=1,
    tables=("CREATE TABLE numbers (number INTEGER PRIMARY KEY, text TEXT NOT NULL) STRICT",),
    remedy="count again",
)


@contextlib.asynccontextmanager
async def _open(path: Path, schema: SqliteSchema = SCHEMA) -> AsyncIterator[SqliteDatabase]:
    database = SqliteDatabase(path, schema)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


async def _add(database: SqliteDatabase, number: int) -> None:
    await database.transact(
        lambda connection: connection.execute("INSERT INTO numbers VALUES (?, ?)", (number, "x" * 500))
    )


async def _numbers(database: SqliteDatabase) -> list[int]:
    def read(connection: sqlite3.Connection) -> list[int]:
        return [number for (number,) in connection.execute("SELECT number FROM numbers ORDER BY number")]

    return await database.transact(read)


MOVES = [
    lost_files.unlink,
    lost_files.replace_by_nothing,
    lost_files.replace_by_another,
    lost_files.move,
    lost_files.remove_folder,
]


@pytest.mark.parametrize("lose", MOVES)
async def test_a_file_that_was_moved_is_put_back_with_all_that_was_in_it(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    path = tmp_path / "state" / "numbers.db"
    async with _open(path) as database:
        for number in range(20):
            await _add(database, number)
        lose(path)
        await _add(database, 20)
        assert await _numbers(database) == list(range(21))
    async with _open(path) as database:
        assert await _numbers(database) == list(range(21))
    aside = [part for part in path.parent.iterdir() if part.match("numbers.damaged-*.db")]
    assert [part.read_bytes()[:12] for part in aside] == (
        [b"another file"] if lose is lost_files.replace_by_another else []
    )


@pytest.mark.parametrize("size_bytes", [0, 4096, 6000])
async def test_a_truncated_file_is_made_anew_and_nothing_is_acknowledged_in_vain(
    tmp_path: Path, size_bytes: int
) -> None:
    path = tmp_path / "numbers.db"
    async with _open(path) as database:
        for number in range(50):
            await _add(database, number)
        os.truncate(path, size_bytes)
        with pytest.raises(StorageUnavailable, match=r"the list of numbers was truncated.*: count again") as caught:
            await _add(database, 50)
        assert caught.value.retry_after_s
        await _add(database, 51)
        assert await _numbers(database) == [51]
    async with _open(path) as database:
        assert await _numbers(database) == [51]


async def test_a_file_that_goes_within_a_transaction_is_noticed_before_it_is_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "numbers.db"
    async with _open(path) as database:
        await _add(database, 1)

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO numbers VALUES (2, 'b')")
            path.unlink()

        expected = {1, 3}
        with contextlib.suppress(StorageUnavailable):
            await database.transact(write)
            expected.add(2)
        await _add(database, 3)
        assert set(await _numbers(database)) >= expected
    async with _open(path) as database:
        assert set(await _numbers(database)) >= expected


@pytest.mark.parametrize("schema", [SCHEMA, LORAS], ids=["numbers", "LoRAs"])
async def test_nothing_that_others_can_truncate_is_mapped_into_the_process(
    tmp_path: Path, schema: SqliteSchema
) -> None:
    async with _open(tmp_path / "some.db", schema) as database:
        await database.transact(lambda connection: connection.execute("SELECT count(*) FROM sqlite_schema").fetchall())
        mapped = await asyncio.to_thread(Path("/proc/self/maps").read_text, encoding="utf-8")
        assert str(tmp_path) not in mapped
