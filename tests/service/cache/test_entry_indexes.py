"""Every index of entries: in memory, on a device (here the CPU) and in PostgreSQL with pgvector.

Then what is particular to the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import faiss
import numpy as np
import psycopg
import pytest
from numpy.typing import NDArray

from bottega.cache.index import postgresql
from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.index.postgresql import PostgresIndex, cache_database
from bottega.cache.index.vector_index import EntryIndex, IndexSettings
from bottega.errors import ConfigError, QueueFull, StorageUnavailable
from tests.support.postgresql import PostgresServer, new_database, running_server, shared_server
from tests.support.waiting import wait_until

WIDTH = 8
MOST = 100

Opened = Callable[[], EntryIndex]
"""Opens the index, or opens it again: then it has what was stored, which is loaded again from records."""


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    with new_database(vector=True) as url:
        yield url


@pytest.fixture(params=["memory", "device", "postgresql"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    url = request.getfixturevalue("database") if request.param == "postgresql" else ""
    with ExitStack() as stack:

        def open_index() -> EntryIndex:
            on_device = IndexSettings(flat_entries=2, make_device_index=faiss.IndexFlatIP)
            settings = on_device if request.param == "device" else IndexSettings()
            index: EntryIndex = KeyedIndex(max_entries=MOST, settings=settings)
            if url:
                index = _opened(url, cache=request.node.name)
            stack.callback(index.close)
            return index

        yield open_index


@pytest.fixture
def index(opened: Opened) -> EntryIndex:
    return opened()


def _opened(url: str, *, cache: str = "cache") -> PostgresIndex:
    index = PostgresIndex(cache_database(url), cache=cache, max_entries=MOST)
    index.open()
    return index


def _random(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, WIDTH), dtype=np.float32)


def test_an_entry_is_found_under_its_own_key_alone(index: EntryIndex) -> None:
    vectors = _random(40)
    for number, vector in enumerate(vectors):
        index.add(f"key{number % 3}", number, vector)
    for number, vector in enumerate(vectors):
        for key in range(3):
            found = index.search(f"key{key}", vector, 64)
            assert {match.number % 3 for match in found} == {key}
            assert (found[0].number == number) is (number % 3 == key)
            assert [match.similarity for match in found] == sorted((m.similarity for m in found), reverse=True)
            assert index.search(f"key{key}", vector, 1) == found[:1], "entries of other keys are not in its way"
    assert index.search("key3", vectors[0], 1) == []
    assert [index.entries(f"key{key}") for key in range(4)] == [14, 13, 13, 0]


def test_similarity_is_the_cosine_whatever_the_lengths(index: EntryIndex) -> None:
    index.add("key", 1, np.array([3.0, 4.0]))
    assert index.search("key", np.array([0.0, 0.01]), 1)[0].similarity == pytest.approx(0.8)
    assert index.similarity("key", 1, np.array([70.0, 0.0])) == pytest.approx(0.6)
    assert index.similarity("key", 2, np.array([7.0, 0.0])) is None
    assert index.similarity("other", 1, np.array([7.0, 0.0])) is None


def test_a_key_vanishes_with_its_last_entry_and_may_come_back_wider(index: EntryIndex) -> None:
    index.add("key", 1, _random(1)[0])
    with pytest.raises(ValueError, match="8 dimensions, not 3"):
        index.add("key", 2, np.ones(3))
    assert index.remove("key", 1)
    assert not index.remove("key", 1)
    assert index.entries("key") == 0
    index.add("key", 1, np.ones(3))
    assert index.search("key", np.ones(3), 5)[0].number == 1


def test_a_removed_entry_is_not_found_and_may_come_back(index: EntryIndex) -> None:
    vectors = _random(30)
    index.load("key", np.arange(30), vectors)
    index.loaded()
    for number in range(20):
        assert index.remove("key", number)
        assert all(match.number > number for match in index.search("key", vectors[number], 30 - number))
    for number in range(20):
        index.add("key", number, vectors[number])
        assert index.search("key", vectors[number], 1)[0].number == number


def test_there_are_at_most_so_many_entries(index: EntryIndex) -> None:
    vectors = _random(MOST + 1)
    index.load("key", np.arange(MOST - 1), vectors[: MOST - 1])
    index.add("other", MOST, vectors[MOST])
    with pytest.raises(QueueFull, match="max_entries"):
        index.add("other", MOST + 1, vectors[MOST])
    with pytest.raises(QueueFull):
        index.load("key", np.arange(MOST + 1, MOST + 4), vectors[:3])
    assert index.remove("key", 0)
    index.add("other", MOST + 1, vectors[MOST])


def test_what_is_no_direction_is_neither_added_nor_searched(index: EntryIndex) -> None:
    for vector in (np.zeros(8), np.full(8, np.nan), np.array([np.inf, 1.0]), np.empty(0), np.ones((2, 2, 2))):
        with pytest.raises(ValueError, match="empty, zero or not finite"):
            index.add("key", 1, vector)
        with pytest.raises(ValueError, match="empty, zero or not finite"):
            index.search("key", vector, 1)
    assert index.entries("key") == 0
    for count in (0, 65):
        with pytest.raises(ValueError, match="1 to 64"):
            index.search("key", _random(1)[0], count)


def test_numbers_are_not_negative_and_loaded_once_each(index: EntryIndex) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        index.add("key", -1, _random(1)[0])
    with pytest.raises(ValueError, match="at least 0"):
        index.load("key", np.array([3, -1]), _random(2))
    with pytest.raises(ValueError, match="numbers must be unique"):
        index.load("key", np.array([3, 3]), _random(2))
    with pytest.raises(ValueError, match="with one vector for each"):
        index.load("key", np.array([3, 4]), _random(3))
    index.load("key", np.arange(0), _random(0))
    assert index.entries("key") == 0


def test_a_sample_has_each_entry_at_most_once(index: EntryIndex) -> None:
    vectors = _random(60)
    index.load("key", np.arange(60), vectors)
    index.remove("key", 3)
    every = index.sample("key", 1000)
    assert every.shape == (59, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(every, axis=1), 1.0, atol=1e-3)
    assert len(np.unique(every, axis=0)) == 59
    assert index.sample("key", 10).shape == (10, WIDTH)
    assert index.sample("other", 10).size == 0


def test_a_closed_index_takes_nothing_and_closes_again(index: EntryIndex) -> None:
    index.add("key", 1, _random(1)[0])
    index.close()
    index.close()
    for key in ("key", "other"):
        with pytest.raises(LookupError):
            index.add(key, 2, _random(1)[0])
    index.remove("key", 1)


def test_only_what_is_loaded_again_is_found_after_a_restart(opened: Opened) -> None:
    vectors, changed = _random(20), _random(1, seed=5)[0]
    before = opened()
    before.load("key", np.arange(20), vectors)
    before.close()
    vectors[4] = changed  # records were lost, and the number was given again
    after = opened()
    after.load("key", np.arange(3, 10), vectors[3:10])
    after.load("key", np.arange(10, 15), vectors[10:15])
    after.loaded()
    assert sorted(match.number for match in after.search("key", vectors[0], 64)) == list(range(3, 15))
    assert after.search("key", changed, 1)[0].similarity == pytest.approx(1.0)


def test_caches_with_one_database_do_not_see_each_other_s_entries() -> None:
    with new_database(vector=True) as url:
        one, two = _opened(url, cache="one"), _opened(url, cache="two")
        try:
            one.add("key", 1, _random(1)[0])
            two.add("key", 1, _random(1, seed=1)[0])
            two.loaded()
            assert one.search("key", _random(1)[0], 5)[0].similarity == pytest.approx(1.0)
            assert two.remove("key", 1)
            assert one.similarity("key", 1, _random(1)[0]) == pytest.approx(1.0)
        finally:
            one.close()
            two.close()


def test_removed_vectors_are_deleted_from_the_database() -> None:
    server = shared_server(vector=True)
    with new_database(vector=True) as url:
        index = _opened(url)
        try:
            index.load("key", np.arange(50), _random(50))
            for number in range(49):
                index.remove("key", number)
            name = urlsplit(url).path[1:]
            count = "SELECT count(*) FROM bottega_cache_vectors"
            wait_until(lambda: server.execute(count, name) == [(1,)], "the deletion")
        finally:
            index.close()


def test_a_graph_is_built_after_loading_and_finds_the_same() -> None:
    """Sorting is off, so that the planner reads a graph as soon as there is one."""
    server = shared_server(vector=True)
    with new_database(vector=True) as url:
        name = urlsplit(url).path[1:]
        server.execute(f"ALTER DATABASE {name} SET enable_sort = off")
        vectors = _random(3 * MOST)
        other = _opened(url, cache="it's 100% another")
        index = _opened(url)
        try:
            other.load("key", np.arange(MOST), vectors[:MOST])
            index.load("key", np.arange(MOST // 2), vectors[: MOST // 2])
            index.load("key2", np.arange(MOST // 2), -vectors[: MOST // 2])
            assert _graphs(server, name) == 0, "loading into a graph is slow"
            wanted = vectors[::8]
            compared = [index.search("key", vector, 1)[0].number for vector in wanted]
            index.loaded()
            other.loaded()
            wait_until(lambda: _graphs(server, name) == 2, "a graph of each cache")
            with psycopg.connect(server.url(name), autocommit=True) as connection:
                rows = connection.execute(
                    "EXPLAIN SELECT number FROM bottega_cache_vectors WHERE width = 8 AND cache = 'cache' AND key ="
                    f" 'key' ORDER BY embedding::vector(8) <#> '{vectors[0].tolist()}'::vector(8) LIMIT 1"
                ).fetchall()
            assert "Index Scan using bottega_cache_" in str(rows), rows
            assert [index.search("key", vector, 1)[0].number for vector in wanted] == compared
            index.remove("key", 0)
            index.add("key", MOST, vectors[-1])
            assert index.search("key", vectors[-1], 1)[0].number == MOST
        finally:
            index.close()
            other.close()


def test_a_graph_whose_building_was_interrupted_is_built_again() -> None:
    server = shared_server(vector=True)
    with new_database(vector=True) as url:
        name = urlsplit(url).path[1:]
        for _ in range(2):
            index = _opened(url)
            try:
                index.load("key", np.arange(10), _random(10))
                index.loaded()
                wait_until(lambda: _graphs(server, name) == 1, "the graph")
                server.execute(
                    "UPDATE pg_index SET indisvalid = false WHERE indexrelid IN (SELECT pg_class.oid FROM pg_class"
                    " JOIN pg_am ON pg_am.oid = relam WHERE amname = 'hnsw')",
                    name,
                )
            finally:
                index.close()


def _graphs(server: PostgresServer, database: str) -> int:
    query = (
        "SELECT count(*) FROM pg_index JOIN pg_class ON oid = indexrelid JOIN pg_am ON pg_am.oid = relam"
        " WHERE amname = 'hnsw' AND indisvalid"
    )
    return int(server.execute(query, database)[0][0])


def test_a_database_that_is_away_is_reported_and_used_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server(vector=True) as server:
        url = server.url(server.new_database())
        server.stop()
        index = _opened(url)
        try:
            with pytest.raises(StorageUnavailable):
                index.add("key", 1, _random(1)[0])
            server.start()

            def has_loaded() -> bool:
                try:
                    index.load("key", np.arange(10), _random(10))
                except StorageUnavailable:
                    return False
                return True

            wait_until(has_loaded, "the database")
            server.stop()
            with monkeypatch.context() as patched:
                patched.setattr(postgresql, "_SEARCH_S", 0.1)
                patched.setattr(postgresql, "_CHANGE_S", 0.1)
                with pytest.raises(StorageUnavailable):
                    index.search("key", _random(1)[0], 1)
                with pytest.raises(StorageUnavailable):
                    index.add("key", 11, _random(1)[0])
            assert index.remove("key", 3), "it is not found any more, wherever it is stored"
            assert index.sample("key", 5).size == 0
            server.start()

            def is_back() -> bool:
                try:
                    return len(index.search("key", _random(1)[0], 64)) == 9
                except StorageUnavailable:
                    return False

            wait_until(is_back, "the database")
            index.add("key", 11, _random(1)[0])
        finally:
            index.close()


def test_a_user_who_may_not_create_the_extension_is_told_what_to_do() -> None:
    server = shared_server(vector=True)
    with new_database(vector=True) as url:
        name = urlsplit(url).path[1:]
        server.execute(f"CREATE ROLE plain_{name} LOGIN")
        index = PostgresIndex(cache_database(server.url(name, user=f"plain_{name}")), cache="cache")
        try:
            with pytest.raises(ConfigError, match="lacks the extension vector: let a superuser run CREATE EXTENSION"):
                index.open()
        finally:
            index.close()
            server.execute(f"DROP ROLE plain_{name}")
