"""A cache whose embeddings are in PostgreSQL serves as any other, and nothing while the database is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bottega.cache.__main__ import build
from bottega.cache.config import CacheIndexConfig
from bottega.cache.index import postgresql
from bottega.cache.index.postgresql import PostgresIndex, cache_database
from bottega.cache.index.vector_index import Numbers, Vectors
from bottega.cache.index.vector_table import VectorTable
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.errors import ConfigError, StorageUnavailable
from bottega.transport import Link
from bottega.v1 import cache_pb2 as pb
from tests.support.postgresql import PASSWORD, PostgresServer, new_database, running_server, shared_server
from tests.support.running_cache import Answer, ask, config, embedding, latents, profile, record, running
from tests.support.waiting import eventually, wait_until

_OUTAGE = [
    "pictures begin from noise until the cache's database answers",
    "the approximate cache records nothing until it can write again",
    "the cache's database answers again",
    "the approximate cache can write again",
]


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that tests stop and start again."""
    with running_server(vector=True) as server:
        yield server


async def _ask(link: Link, number: int) -> Answer:
    return await asyncio.to_thread(ask, link, embedding(number))


async def test_entries_are_found_by_the_database_also_after_a_restart(tmp_path: Path) -> None:
    with new_database(vector=True) as url:
        async with running(tmp_path, config(database=url)) as cache:
            await cache.call("SetCacheProfile", profile=profile())
            await cache.fill("a", "b")
        async with running(tmp_path, config(database=url)) as cache:
            link = await cache.link()

            async def has_loaded() -> bool:
                return bool((await _ask(link, 1)).latents)

            await eventually(has_loaded)
            assert (await _ask(link, 1)).latents[0] == pytest.approx(latents(1)[4])
            assert (await _ask(link, 5)).header.outcome == pb.CACHE_OUTCOME_MISS
            assert (await cache.call("ClearCache")).entries == 2
            assert not (await _ask(link, 1)).latents
            link.close()


async def test_pictures_begin_from_noise_while_the_database_is_away(
    tmp_path: Path, own_server: PostgresServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    settings = config(database=own_server.url(own_server.new_database()))
    async with running(tmp_path, settings) as cache:
        link = await cache.link()
        await cache.call("SetCacheProfile", profile=profile())
        await cache.fill("a")
        own_server.stop()
        with monkeypatch.context() as patched:
            patched.setattr(postgresql, "_SEARCH_S", 0.1)
            away = await _ask(link, 0)
        assert (away.header.outcome, away.latents) == (pb.CACHE_OUTCOME_UNAVAILABLE, ())
        await asyncio.to_thread(record, link, embedding(1), prompt="b", seed=1)

        async def is_in_trouble() -> bool:
            return bool((await cache.call("GetCacheStats")).trouble)

        await eventually(is_in_trouble)
        assert (await _ask(link, 0)).header.outcome == pb.CACHE_OUTCOME_UNAVAILABLE
        own_server.start()

        async def is_back() -> bool:
            return bool((await _ask(link, 0)).latents) and not await is_in_trouble()

        await eventually(is_back)
        await asyncio.to_thread(record, link, embedding(1), prompt="b", seed=1)

        async def is_recorded() -> bool:
            return bool((await _ask(link, 1)).latents)

        await eventually(is_recorded)
        link.close()
    said = [(line.message, getattr(line, "text", "")) for line in caplog.records if line.message in _OUTAGE]
    assert sorted(message for message, _ in said) == sorted(_OUTAGE), "each once"
    assert all(text.startswith("the database ") and f":{own_server.port}/" in text for _, text in said[:2]), said


class _CountingIndex(PostgresIndex):
    """An index that counts how often it was tested."""

    probes = 0

    def probe(self) -> None:
        self.probes += 1
        super().probe()


def test_an_outage_at_the_start_is_logged_once(
    tmp_path: Path, own_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    index = _CountingIndex(cache_database(own_server.url(own_server.new_database())), cache="cache")
    own_server.stop()
    index.open()
    store = LatentStore(StoreSettings(folder=tmp_path, budget_bytes=1 << 20, retry_s=0.05), index=index)
    store.start()
    try:
        wait_until(lambda: index.probes > 3, "some attempts")
        own_server.start()
        wait_until(lambda: not store.statistics().trouble, "the end of the outage")
    finally:
        store.close()
    said = [line.message for line in caplog.records if line.message in _OUTAGE]
    assert said == ["the approximate cache records nothing until it can write again", _OUTAGE[-1]]


def test_a_vector_is_written_by_one_statement() -> None:
    server = shared_server(vector=True)
    with new_database(vector=True) as url:
        name = urlsplit(url).path[1:]
        for setting in ("log_statement = 'all'", "log_min_messages = 'log'"):
            server.execute(f"ALTER DATABASE {name} SET {setting}")
        index = PostgresIndex(cache_database(url), cache="cache")
        index.open()
        try:
            index.add("key", 1, embedding(0))
            wait_until(lambda: index.has_graphs, "the graph")
            for number, seed in ((2, 1), (2, 2)):
                log = server.folder / "log"
                before = log.stat().st_size
                index.add("key", number, embedding(seed))
                written = log.read_text()[before:].splitlines()
                statements = [line for line in written if "LOG:" in line and "set_config(" not in line]  # of no session
                assert [statement for statement in statements if "INSERT INTO" not in statement] == []
                assert any("INSERT INTO bottega_cache_vectors" in line for line in written)
                assert index.search("key", embedding(seed), 1)[0].number == 2
            assert index.similarity("key", 2, embedding(2)) == pytest.approx(1.0)
            assert len(index) == 2
        finally:
            index.close()


def test_caches_that_begin_at_once_all_get_their_graphs(caplog: pytest.LogCaptureFixture) -> None:
    with new_database(vector=True) as url:
        indexes = [PostgresIndex(cache_database(url), cache=f"cache {number}") for number in range(4)]

        def begin(index: PostgresIndex) -> None:
            index.open()
            index.add("key", 1, embedding(0))

        try:
            with ThreadPoolExecutor(4) as threads:
                list(threads.map(begin, indexes))
            wait_until(lambda: all(index.has_graphs for index in indexes), "the graphs")
        finally:
            for index in indexes:
                index.close()
    assert not [line for line in caplog.records if "graph" in line.message]


def test_what_a_write_has_left_when_it_was_given_up_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = shared_server(vector=True)
    write, delete = VectorTable.write, VectorTable.delete
    failures = [RuntimeError("a defect")]

    async def write_and_hang(table: VectorTable, key: str, numbers: Numbers, vectors: Vectors) -> None:
        await write(table, key, numbers, vectors)
        await asyncio.sleep(60)

    async def delete_at_second(table: VectorTable, gone: Sequence[tuple[str, int]]) -> None:
        if failures:
            raise failures.pop()
        await delete(table, gone)

    with new_database(vector=True) as url:
        index = PostgresIndex(cache_database(url), cache="cache")
        index.open()
        monkeypatch.setattr(postgresql, "_CHANGE_S", 1.0)
        monkeypatch.setattr(postgresql, "_RETRY_S", 0.1)
        monkeypatch.setattr(VectorTable, "delete", delete_at_second)
        try:
            with monkeypatch.context() as patched:
                patched.setattr(VectorTable, "write", write_and_hang)
                with pytest.raises(StorageUnavailable, match="does not answer"):
                    index.add("key", 1, embedding(0))
            assert index.entries("key") == 0
            name = urlsplit(url).path[1:]
            wait_until(
                lambda: server.execute("SELECT count(*) FROM bottega_cache_vectors", name) == [(0,)], "the deletion"
            )
            assert not failures
            index.add("key", 1, embedding(0))
            assert [match.number for match in index.search("key", embedding(0), 5)] == [1]
        finally:
            index.close()


async def test_a_database_that_cannot_be_used_is_a_clear_error_without_the_password(tmp_path: Path) -> None:
    server = shared_server(vector=True)
    wrong = {
        "mysql://somewhere/cache": "postgresql://",
        server.url("no_such_database", password=PASSWORD): 'database "no_such_database" does not exist',
        server.url("postgres", password="falsch-geraten"): "password authentication failed",
    }
    for url, text in wrong.items():
        with pytest.raises(ConfigError, match=text) as raised:
            build(config(database=url), tmp_path)
        assert not {PASSWORD, "falsch-geraten"} & set(str(raised.value).replace("@", " ").replace(":", " ").split())


async def test_embeddings_are_in_a_database_or_on_a_device(tmp_path: Path) -> None:
    on_device = CacheIndexConfig(device="cuda")
    with pytest.raises(ConfigError, match=r"index\.device is for embeddings in memory: remove it, or database"):
        build(config(database="postgresql://somewhere/cache", index=on_device), tmp_path)
