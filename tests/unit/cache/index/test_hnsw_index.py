"""A key's index while its graph is made beside it: when that is, and that nothing is lost or found wrongly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.index.hnsw_index import HnswIndex
from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import unit_vectors
from tests.support.waiting import EVENTUALLY_S

WIDTH = 16
SETTINGS = IndexSettings(flat_entries=200, recent_entries=50, deleted_share=0.2)


class _Gate:
    """Stands before a call of FAISS: who comes waits until it is opened."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self._opened.wait(EVENTUALLY_S)
        return self._call(*args, **kwargs)

    def open(self) -> None:
        self._opened.set()


class _Builds:
    """Rebuilds in a thread each, as an index has them made."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def __call__(self, index: HnswIndex) -> None:
        self._threads.append(threading.Thread(target=index.rebuild))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(EVENTUALLY_S)
            assert not thread.is_alive()


@pytest.fixture
def builds() -> Iterator[_Builds]:
    made = _Builds()
    yield made
    made.join()


def _gate(monkeypatch: pytest.MonkeyPatch, name: str) -> _Gate:
    gate = _Gate(getattr(faiss, name))
    monkeypatch.setattr(faiss, name, gate)
    return gate


def _random(count: int, seed: int = 0) -> NDArray[np.float32]:
    return unit_vectors(np.random.default_rng(seed).standard_normal((count, WIDTH)))


def _filled(count: int, on_due: Callable[[HnswIndex], None] = HnswIndex.rebuild) -> HnswIndex:
    index = HnswIndex(WIDTH, SETTINGS, on_due=on_due)
    index.add_all(np.arange(count), _random(count))
    index.rebuild()
    return index


def _nearest(index: HnswIndex, vector: NDArray[np.float32]) -> int:
    return index.search(vector, 1)[0].number


def test_a_graph_is_made_from_the_stated_number_on() -> None:
    index = HnswIndex(WIDTH, SETTINGS, on_due=HnswIndex.rebuild)
    for number, vector in enumerate(_random(200)):
        assert index.graph_rows == (0, 0)
        index.add(number, vector)
    assert index.graph_rows == (200, 0)


def test_what_was_added_goes_into_the_graph_in_groups_and_is_found_at_once() -> None:
    index = _filled(200)
    for number, vector in enumerate(_random(50, seed=1), start=200):
        assert index.graph_rows == (200, 0)
        index.add(number, vector)
        assert _nearest(index, vector) == number
    assert index.graph_rows == (250, 0)


def test_deleted_nodes_leave_the_graph_when_they_are_a_fifth_of_it() -> None:
    index = _filled(500)
    for number in range(99):
        index.remove(number)
    assert index.graph_rows == (401, 99)
    index.remove(99)
    assert index.graph_rows == (400, 0)
    assert sorted(index.numbers().tolist()) == list(range(100, 500))


def test_a_key_with_few_entries_left_has_no_graph_any_more() -> None:
    index = _filled(200)
    for number in range(40):
        index.remove(number)
    assert index.graph_rows == (0, 0)
    assert _nearest(index, _random(200)[150]) == 150


def test_a_neighbour_is_found_behind_many_that_were_deleted() -> None:
    """A search meets nothing but deleted nodes at first, more of them than it keeps candidates."""
    settings = IndexSettings(flat_entries=1000, deleted_share=0.5)
    index = HnswIndex(WIDTH, settings, on_due=HnswIndex.rebuild)
    middle = _random(1)[0]
    near = unit_vectors(middle + 0.1 * _random(800, seed=1))
    index.add_all(np.arange(1800), np.concatenate([near, _random(1000, seed=2)]))
    index.rebuild()
    for number in range(800):
        index.remove(number)
    assert index.graph_rows == (1000, 800)
    assert len(index.search(middle, 8)) == 8


@pytest.mark.parametrize(("entries", "call"), [(199, "IndexHNSWSQ"), (200, "clone_index")])
def test_searches_and_changes_go_on_while_a_graph_is_made(
    monkeypatch: pytest.MonkeyPatch, builds: _Builds, entries: int, call: str
) -> None:
    index, vectors, others = _filled(entries, on_due=builds), _random(entries), _random(60, seed=1)
    gate = _gate(monkeypatch, call)
    for number, vector in enumerate(others[:50], start=1000):
        index.add(number, vector)
    assert gate.reached.wait(EVENTUALLY_S)

    assert _nearest(index, vectors[3]) == 3
    index.remove(4)  # from what was there long before
    index.remove(1004)  # from what goes into the new graph
    index.add(5, others[55])  # a replacement of either
    index.add(1005, others[56])
    index.add(2000, others[57])  # something new
    index.remove(6)  # and something that comes back
    index.add(6, others[58])

    def check() -> None:
        assert {_nearest(index, vectors[4]), _nearest(index, others[4])}.isdisjoint({4, 1004})
        found = [_nearest(index, others[place]) for place in (55, 56, 57, 58)]
        assert found == [5, 1005, 2000, 6]
        assert _nearest(index, vectors[5]) != 5
        assert len(index) == len(index.numbers()) == len(set(index.numbers().tolist())) == entries + 49

    check()
    gate.open()
    builds.join()
    assert index.rebuilds
    check()


def test_what_is_removed_during_a_search_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    index, vectors = _filled(200), _random(200)
    search = faiss.IndexHNSWSQ.search

    def remove_after(*args: Any, **kwargs: Any) -> Any:
        found = search(*args, **kwargs)
        index.remove(7)
        return found

    monkeypatch.setattr(faiss.IndexHNSWSQ, "search", remove_after)
    assert all(match.number != 7 for match in index.search(vectors[7], 5))


def test_one_build_is_asked_for_however_much_changes_meanwhile() -> None:
    asked: list[HnswIndex] = []
    index = HnswIndex(WIDTH, SETTINGS, on_due=asked.append)
    for number, vector in enumerate(_random(300)):
        index.add(number, vector)
    assert len(asked) == 1


def test_what_is_due_again_after_a_build_is_built_too(monkeypatch: pytest.MonkeyPatch, builds: _Builds) -> None:
    index = _filled(200, on_due=builds)
    gate = _gate(monkeypatch, "clone_index")
    for number, vector in enumerate(_random(200, seed=1), start=200):
        index.add(number, vector)
    assert gate.reached.wait(EVENTUALLY_S)
    gate.open()
    builds.join()
    assert index.graph_rows[0] > 350


def test_a_build_ends_with_its_index(monkeypatch: pytest.MonkeyPatch, builds: _Builds) -> None:
    index = _filled(200, on_due=builds)
    gate = _gate(monkeypatch, "clone_index")
    for number, vector in enumerate(_random(50, seed=1), start=200):
        index.add(number, vector)
    assert gate.reached.wait(EVENTUALLY_S)
    index.close()
    gate.open()
    builds.join()
    assert index.graph_rows == (200, 0)
    with pytest.raises(LookupError):
        index.add(1, _random(1)[0])


def test_after_a_failed_build_everything_is_still_found_and_the_next_one_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    index, others = _filled(200), _random(60, seed=1)
    monkeypatch.setattr(faiss, "clone_index", _fail)
    asked = 0
    for number, vector in enumerate(others, start=200):
        try:
            index.add(number, vector)
        except MemoryError:
            asked += 1
        assert _nearest(index, vector) == number
    assert asked == 1
    monkeypatch.undo()
    index.rebuild()
    assert index.graph_rows == (260, 0)


def _fail(index: faiss.Index) -> faiss.Index:
    raise MemoryError
