"""Group commits: what waits shares one, a failing operation fails alone, a failing commit fails its group and heals."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bottega.errors import StorageUnavailable
from bottega.gateway.jobs.store.sqlite_writer import GroupCommit
from bottega.storage import os_errors


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.sqlite"
    connection = sqlite3.connect(path)
    # A deferred check fails at the commit and nowhere before it.
    connection.executescript(
        """
        CREATE TABLE known (number INTEGER PRIMARY KEY);
        CREATE TABLE numbers (number INTEGER UNIQUE REFERENCES known DEFERRABLE INITIALLY DEFERRED);
        """
    )
    connection.executemany("INSERT INTO known VALUES (?)", [(number,) for number in range(1000)])
    connection.commit()
    connection.close()
    return path


@pytest.fixture
async def commits(path: Path) -> AsyncIterator[GroupCommit]:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def typed(error: sqlite3.Error) -> Exception | None:
        at_commit = "FOREIGN KEY" in str(error)
        return os_errors.unavailable("the disk is full", cause="ENOSPC") if at_commit else None

    commits = GroupCommit(connect, typed, lambda seconds: None)
    yield commits
    await commits.close()


def _insert(number: int) -> Callable[[sqlite3.Connection], int]:
    def insert(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO numbers VALUES (?)", (number,))
        return number

    return insert


def _stored(path: Path) -> list[int]:
    connection = sqlite3.connect(path)
    rows = connection.execute("SELECT number FROM numbers ORDER BY number").fetchall()
    connection.close()
    return [number for (number,) in rows]


@contextlib.asynccontextmanager
async def _held(commits: GroupCommit) -> AsyncIterator[None]:
    """Holds the thread until the end of the block, so that what is queued in it forms one group."""
    holds, gate = threading.Event(), threading.Event()

    def hold(_: sqlite3.Connection) -> bool:
        holds.set()
        return gate.wait(10)

    holding = asyncio.create_task(commits.run(hold))
    assert await asyncio.to_thread(holds.wait, 10)
    try:
        yield
    finally:
        gate.set()
        assert await holding


async def _all_at_once(
    commits: GroupCommit, *operations: Callable[[sqlite3.Connection], int]
) -> list[int | BaseException]:
    async with _held(commits):
        tasks = [asyncio.create_task(commits.run(operation)) for operation in operations]
        await asyncio.sleep(0)
    return await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_waits_shares_a_commit_and_is_durable_when_it_returns(commits: GroupCommit, path: Path) -> None:
    async def insert(number: int) -> None:
        assert await commits.run(_insert(number)) == number
        assert number in await asyncio.to_thread(_stored, path)

    await asyncio.gather(*(insert(number) for number in range(200)))
    assert commits.commits <= 20
    for number in range(200, 210):
        await insert(number)
    assert commits.commits >= 11, "one that waits for each has a commit for each"


async def test_a_failing_operation_fails_alone(commits: GroupCommit, path: Path) -> None:
    def half(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO numbers VALUES (7)")
        raise LookupError("ours")

    results = await _all_at_once(commits, _insert(1), _insert(1), half, _insert(2))
    assert [type(result) for result in results] == [int, sqlite3.IntegrityError, LookupError, int]
    assert _stored(path) == [1, 2]
    assert commits.commits == 2


async def test_a_failing_commit_fails_its_group_and_later_ones_are_tried_again(
    commits: GroupCommit, path: Path
) -> None:
    results = await _all_at_once(commits, _insert(1), _insert(5000), _insert(2))
    assert [type(result) for result in results] == [StorageUnavailable] * 3
    assert len({id(result) for result in results}) == 3, "an error of its own for each who waits"
    assert _stored(path) == []
    assert await commits.run(_insert(3)) == 3
    assert _stored(path) == [3]


async def test_what_nobody_waits_for_any_more_is_not_done(commits: GroupCommit, path: Path) -> None:
    async with _held(commits):
        waiting = [asyncio.create_task(commits.run(_insert(number))) for number in range(4)]
        await asyncio.sleep(0)
        waiting[1].cancel()
        waiting[2].cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert _stored(path) == [0, 3]


async def test_close_finishes_what_waits(commits: GroupCommit, path: Path) -> None:
    waiting = [asyncio.create_task(commits.run(_insert(number))) for number in range(9)]
    await asyncio.sleep(0)
    await commits.close()
    assert await asyncio.gather(*waiting) == list(range(9)) == _stored(path)
    with pytest.raises(StorageUnavailable):
        await commits.run(_insert(10))
