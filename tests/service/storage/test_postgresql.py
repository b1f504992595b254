"""The access to PostgreSQL, against real servers: logins, migrations, outages and notifications."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest

from bottega.errors import ConfigError, DataLoss, InternalError, InvalidRequest, StorageUnavailable
from bottega.storage import postgresql
from bottega.storage.postgresql import Migration, PostgresDatabase, rows_of
from bottega.storage.postgresql_errors import translated
from tests.support.postgresql import PASSWORD, PostgresServer, new_database, running_server, shared_server
from tests.support.waiting import eventually

COUNTERS = Migration(statements="CREATE TABLE counters (name text PRIMARY KEY, value integer); CREATE TABLE more ()")


@pytest.fixture
async def database() -> AsyncIterator[PostgresDatabase]:
    with new_database() as url:
        async with _opened(url) as opened:
            yield opened


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server for faults."""
    with running_server() as server:
        yield server


@contextlib.asynccontextmanager
async def _opened(url: str) -> AsyncIterator[PostgresDatabase]:
    opened = PostgresDatabase(url, application="bottega test")
    await opened.open()
    try:
        yield opened
    finally:
        await opened.close()


async def _count(database: PostgresDatabase) -> None:
    await database.fetch(
        "INSERT INTO counters VALUES ('a', 1) ON CONFLICT (name) DO UPDATE SET value = counters.value + 1"
    )


async def _counts(database: PostgresDatabase) -> bool:
    with contextlib.suppress(StorageUnavailable):
        await _count(database)
        return True
    return False


async def _counted(database: PostgresDatabase) -> int:
    ((value,),) = await database.fetch("SELECT coalesce(max(value), 0) FROM counters")
    return int(value)


@pytest.mark.parametrize(
    ("database", "user", "password", "text"),
    [
        ("nowhere", "postgres", PASSWORD, 'database "nowhere" does not exist'),
        ("postgres", "postgres", "hush-wrong", "password authentication failed"),
        ("postgres", "nobody", "hush-wrong", "password authentication failed"),
    ],
)
async def test_a_wrong_url_is_said_without_its_password(database: str, user: str, password: str, text: str) -> None:
    url = shared_server().url(database, user=user, password=password)
    with pytest.raises(ConfigError, match=text) as raised:
        await PostgresDatabase(url, application="bottega test").open()
    assert "hush" not in raised.value.message


@pytest.mark.parametrize(
    "url",
    [
        "http://u:hush@h/x",
        "postgresql://u:hush%zz@h/x",
        "postgresql://u:hush@h/x?wrong=1",
        "postgresql://u:hush@h:p/x",
        "postgresql://u:a@hush@h/x",
        "postgresql://u:1/hush@h/x",
        "postgresql://u:hush/a@h/x",
        "postgresql://u:hush?a=b@hush@h/x",
    ],
)
async def test_what_is_no_url_of_a_database_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        await PostgresDatabase(url, application="bottega test").open()
    assert "hush" not in raised.value.message


async def test_the_password_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    async with _opened(shared_server().url("postgres", port=shared_server().port)) as database:
        assert await database.fetch("SELECT current_setting('application_name')") == [("bottega test",)]


async def test_a_server_that_is_down_is_unavailable_and_found_later(own_server: PostgresServer) -> None:
    own_server.stop()
    database = PostgresDatabase(own_server.url("postgres", password=PASSWORD), application="bottega test")
    try:
        with pytest.raises(StorageUnavailable, match="cannot be reached"):
            await database.open()
        own_server.start()
        await database.open()
        assert await database.fetch("SELECT 1") == [(1,)]
    finally:
        await database.close()


async def test_who_is_cancelled_as_a_connection_comes_is_cancelled() -> None:
    async def hold(database: PostgresDatabase, held: asyncio.Event) -> None:
        async with database.connection():
            held.set()
            await asyncio.Event().wait()

    with new_database() as url:
        database = PostgresDatabase(url, application="bottega test", max_connections=1)
        await database.open()
        for turns in range(12):  # of the event loop, in one of which the waiting task hears both at once
            held, later = asyncio.Event(), asyncio.Event()
            first, second = asyncio.create_task(hold(database, held)), asyncio.create_task(hold(database, later))
            await eventually(held.is_set)
            await eventually(lambda: database.waiting == 1)
            first.cancel()
            for _ in range(turns):
                await asyncio.sleep(0)
            second.cancel()
            _, left = await asyncio.wait((first, second), timeout=5)
            for task in left:
                task.cancel()
            assert not left, f"cancelled after {turns} turns"
        await database.close()


async def test_migrations_are_applied_once_by_processes_that_start_together(database: PostgresDatabase) -> None:
    steps = [COUNTERS, Migration(statements="INSERT INTO counters VALUES ('a', 5)")]
    assert not await database.has_schema("counters", steps)
    await asyncio.gather(*(database.migrate("counters", steps) for _ in range(4)))
    await database.migrate("other", [Migration(statements="CREATE TABLE others ()")])
    assert await _counted(database) == 5
    assert await database.fetch("SELECT component, version FROM bottega_migrations ORDER BY 1, 2") == [
        ("counters", 1),
        ("counters", 2),
        ("other", 1),
    ]


async def test_a_failed_migration_leaves_nothing(database: PostgresDatabase) -> None:
    broken = Migration(statements="INSERT INTO counters VALUES ('a', 5); SELECT * FROM nowhere")
    with pytest.raises(DataLoss):
        await database.migrate("counters", [COUNTERS, broken])
    assert not await database.has_schema("counters", [COUNTERS])
    await database.migrate("counters", [COUNTERS])
    assert await _counted(database) == 0


async def test_an_older_program_works_with_a_newer_schema_unless_that_excludes_it(database: PostgresDatabase) -> None:
    column = Migration(statements="ALTER TABLE counters ADD note text")
    await database.migrate("counters", [COUNTERS, column])
    await database.migrate("counters", [COUNTERS])
    breaking = Migration(statements="ALTER TABLE counters RENAME value TO number", oldest=3)
    await database.migrate("counters", [COUNTERS, column, breaking])
    with pytest.raises(ConfigError, match=r"schema 3 of counters.*newer version.*knows schema 2"):
        await database.migrate("counters", [COUNTERS, column])


async def test_a_user_without_rights_is_told_what_to_grant() -> None:
    with new_database() as url:
        server, name = shared_server(), url.split("/")[3].split("?")[0]
        server.execute(f"CREATE ROLE guest LOGIN PASSWORD '{PASSWORD}'")
        try:
            async with _opened(server.url(name, user="guest", password=PASSWORD)) as database:
                with pytest.raises(ConfigError, match="GRANT CREATE"):
                    await database.migrate("counters", [COUNTERS])
        finally:
            server.execute("DROP ROLE guest")


async def test_a_transaction_is_undone_if_its_block_fails(database: PostgresDatabase) -> None:
    await database.migrate("counters", [COUNTERS])

    async def broken() -> None:
        async with database.transaction() as connection:
            await rows_of(connection, "INSERT INTO counters VALUES ('a', 1)")
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        await broken()
    assert await _counted(database) == 0


async def test_errors_of_a_full_or_read_only_database_are_typed(database: PostgresDatabase) -> None:
    await database.migrate("counters", [COUNTERS])
    await database.fetch(
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
    )
    await database.fetch("CREATE TRIGGER full_disk BEFORE INSERT ON counters EXECUTE FUNCTION full_disk()")
    with pytest.raises(StorageUnavailable, match="disk is full") as raised:
        await _count(database)
    assert raised.value.metadata["cause"] == "DiskFull"
    async with database.transaction() as connection:
        await rows_of(connection, "SET TRANSACTION READ ONLY")
        with pytest.raises(StorageUnavailable, match="read-only"), translated(""):
            await rows_of(connection, "DELETE FROM counters")


async def test_no_error_of_the_client_leaves_untyped(database: PostgresDatabase) -> None:
    await database.migrate("counters", [COUNTERS])
    add = "INSERT INTO counters VALUES (%s, %s)"
    await database.fetch(add, ("a", 1))
    with pytest.raises(StorageUnavailable, match="in the way") as twice:
        await database.fetch(add, ("a", 1))
    assert twice.value.metadata["cause"] == "UniqueViolation"
    for name, value in (("a\0b", 1), ("b", 1 << 40)):
        with pytest.raises(InvalidRequest, match="cannot store"):
            await database.fetch(add, (name, value))
    for statement in ("SELEKT", "INSERT INTO counters VALUES (NULL)"):
        with pytest.raises(InternalError) as refused:
            await database.fetch(statement)
        assert isinstance(refused.value.__cause__, psycopg.Error)
    with pytest.raises(InternalError):
        await database.fetch(add, ("a",))
    assert await _counted(database) == 1


async def test_commits_wait_for_the_disk_whatever_the_default_of_the_user() -> None:
    with new_database() as url:
        name = url.split("/")[3].split("?")[0]
        shared_server().execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
        async with _opened(url) as database:
            assert await database.fetch("SELECT current_setting('synchronous_commit')") == [("on",)]


async def test_calls_fail_while_the_server_is_dead_and_work_after_it(own_server: PostgresServer) -> None:
    async with _opened(own_server.url(own_server.new_database(), password=PASSWORD)) as database:
        await database.migrate("counters", [COUNTERS])
        await _count(database)
        own_server.kill()
        with pytest.raises(StorageUnavailable):
            await _count(database)
        for change in (own_server.start, own_server.restart):
            change()
            # A connection may take a busy machine longer than a call waits for it.
            await eventually(lambda: _counts(database))
        assert await _counted(database) == 3


async def test_a_frozen_server_is_given_up_after_a_bounded_time(own_server: PostgresServer) -> None:
    async with _opened(own_server.url(own_server.new_database())) as database:
        await database.migrate("counters", [COUNTERS])
        with own_server.frozen(), pytest.raises(StorageUnavailable):
            async with database.transaction(limit_s=0.3) as connection:
                await rows_of(connection, "DELETE FROM counters")
        await _count(database)


async def test_a_server_that_said_something_and_then_nothing_is_given_up(own_server: PostgresServer) -> None:
    name = own_server.new_database()
    async with _opened(own_server.url(name)) as database:
        await database.fetch("LISTEN last_words")
        own_server.execute("NOTIFY last_words", database=name)
        with own_server.frozen(), pytest.raises(StorageUnavailable):
            await asyncio.wait_for(database.fetch("SELECT 1"), 30)
        assert await database.fetch("SELECT 1") == [(1,)]


async def test_notifications_go_on_after_a_restart_which_is_told(
    own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    async def listen(database: PostgresDatabase) -> None:
        async with contextlib.aclosing(database.listen("News")) as payloads:
            async for payload in payloads:
                heard.append(payload)  # noqa: PERF401 - one by one, as they come

    with caplog.at_level(logging.INFO, "bottega.storage.postgresql"):
        async with _opened(own_server.url("postgres")) as database:
            listening = asyncio.create_task(listen(database))
            await eventually(lambda: heard == [""])
            await database.fetch("SELECT pg_notify('News', 'one')")
            await eventually(lambda: heard == ["", "one"])
            own_server.restart()
            await eventually(lambda: heard == ["", "one", ""])
            await database.fetch("SELECT pg_notify('News', 'two')")
            await eventually(lambda: heard == ["", "one", "", "two"])
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
    told = [line.message for line in caplog.records if "notifications" in line.message]
    assert told == [
        "notifications of the database do not come; it is tried again",
        "notifications of the database come again",
    ]


@contextlib.asynccontextmanager
async def _deaf_proxy(server: PostgresServer, *words: bytes) -> AsyncIterator[str]:
    """The URL of a proxy; each word, once, makes it drop all that a client sends from there on."""
    left = list(words)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: list[bytes]) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                if heard := [word for word in words if word in data]:
                    words.remove(heard[0])
                    await reader.read()
                    return
                writer.write(data)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", server.port)
        with contextlib.suppress(OSError):
            await asyncio.gather(forward(reader, inner_writer, left), forward(inner_reader, writer, []))

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        yield server.url("postgres", password=PASSWORD, port=listener.sockets[0].getsockname()[1])
        assert left == []


async def test_a_server_that_is_silent_after_the_login_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _deaf_proxy(shared_server(), b"set_config", b"server_encoding", b"LISTEN") as url:
        monkeypatch.setattr(postgresql, "_ANSWER_S", 0.3)
        database = PostgresDatabase(url, application="bottega test")
        for _ in range(2):
            with pytest.raises(StorageUnavailable):
                await database.open()
        await database.open()
        try:
            assert await database.fetch("SELECT 1") == [(1,)]
            async with contextlib.aclosing(database.listen("News")) as payloads:
                assert await asyncio.wait_for(anext(payloads), 20) == ""
        finally:
            await database.close()
