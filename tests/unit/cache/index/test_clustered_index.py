"""A key's index while its lists are made beside it: when that is, and that nothing is lost or found wrongly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.index import clustered_index
from bottega.cache.index.clustered_index import ClusteredIndex
from bottega.cache.index.clustered_lists import centres_of
from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import unit_vectors
from tests.support.waiting import EVENTUALLY_S

WIDTH = 16
SETTINGS = IndexSettings(flat_entries=200, growth=2.0)


class _Gate:
    """Stands before the making of centres: who comes waits until it is opened."""

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

    def shut(self) -> None:
        """Who comes from now on waits."""
        self._opened.clear()
        self.reached.clear()


class _Builds:
    """Rebuilds in a thread each, as an index has them made."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def __call__(self, index: ClusteredIndex) -> None:
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


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> _Gate:
    made = _Gate(centres_of)
    monkeypatch.setattr(clustered_index, "centres_of", made)
    return made


def _random(count: int, seed: int = 0) -> NDArray[np.float32]:
    return unit_vectors(np.random.default_rng(seed).standard_normal((count, WIDTH)))


def _filled(count: int, on_due: Callable[[ClusteredIndex], None] = ClusteredIndex.rebuild) -> ClusteredIndex:
    index = ClusteredIndex(WIDTH, SETTINGS, on_due=on_due)
    index.add_all(np.arange(count), _random(count))
    index.rebuild()
    return index


def _nearest(index: ClusteredIndex, vector: NDArray[np.float32]) -> int:
    return index.search(vector, 1)[0].number


def test_lists_are_made_from_the_stated_number_on() -> None:
    index = ClusteredIndex(WIDTH, SETTINGS, on_due=ClusteredIndex.rebuild)
    for number, vector in enumerate(_random(200)):
        assert index.listed == 0
        index.add(number, vector)
    assert index.listed == 200


def test_centres_are_made_anew_when_there_are_so_many_times_more_and_not_before() -> None:
    index = _filled(200)
    for number, vector in enumerate(_random(200, seed=1), start=200):
        assert index.rebuilds == 1
        index.add(number, vector)
        assert _nearest(index, vector) == number
    assert (index.rebuilds, index.listed) == (2, 400)


def test_a_key_with_few_entries_left_is_flat_again() -> None:
    index = _filled(400)
    for number in range(199):
        index.remove(number)
        assert index.listed
    index.remove(199)
    assert (index.rebuilds, index.listed) == (2, 200), "of 200 there are lists"
    for number in range(200, 300):
        index.remove(number)
    assert (index.rebuilds, index.listed) == (3, 0)
    assert _nearest(index, _random(400)[350]) == 350
    assert sorted(index.numbers().tolist()) == list(range(300, 400))


def test_a_neighbour_is_found_where_all_around_it_were_removed() -> None:
    index = ClusteredIndex(WIDTH, IndexSettings(flat_entries=1000), on_due=ClusteredIndex.rebuild)
    middle = _random(1)[0]
    near = unit_vectors(middle + 0.1 * _random(800, seed=1))
    index.add_all(np.arange(1800), np.concatenate([near, _random(1000, seed=2)]))
    index.rebuild()
    for number in range(800):
        index.remove(number)
    assert index.listed == 1000
    assert len(index.search(middle, 8)) == 8


def test_of_a_session_among_many_others_the_nearest_is_found() -> None:
    """As prompts lie: chains of small edits, thousands of them around one topic."""
    rng, width = np.random.default_rng(0), 64
    topic = rng.standard_normal(width)
    firsts = unit_vectors(topic + 4.0 * rng.standard_normal((1500, width)))
    prompts = unit_vectors(np.repeat(firsts, 8, axis=0) + 0.04 * rng.standard_normal((12_000, width)))
    index = ClusteredIndex(width, IndexSettings(candidates=300), on_due=ClusteredIndex.rebuild)
    index.add_all(np.arange(len(prompts)), prompts)
    index.rebuild()
    assert index.listed == 12_000
    wanted = rng.permutation(12_000)[:300]
    edited = unit_vectors(prompts[wanted] + 0.02 * rng.standard_normal((300, width)))
    nearest = (edited @ prompts.T).max(axis=1)
    found = [index.search(vector, 1)[0].similarity for vector in edited]
    assert np.mean(np.array(found) >= nearest - 5e-4) >= 0.98


@pytest.mark.parametrize("entries", [199, 399])
def test_searches_and_changes_go_on_while_centres_are_made(builds: _Builds, gate: _Gate, entries: int) -> None:
    index, vectors, others = ClusteredIndex(WIDTH, SETTINGS, on_due=builds), _random(entries), _random(60, seed=1)
    if entries > 200:
        gate.open()
    index.add_all(np.arange(min(entries, 200)), vectors[:200])
    index.rebuild()
    if entries > 200:
        gate.shut()
        index.add_all(np.arange(200, entries), vectors[200:])
    index.add(1000, others[0])
    assert gate.reached.wait(EVENTUALLY_S)

    assert _nearest(index, vectors[3]) == 3
    index.remove(4)  # from what was there long before
    index.remove(1000)  # from what was added last
    index.add(5, others[55])  # a replacement
    index.add(2000, others[57])  # something new
    index.remove(6)  # and something that comes back
    index.add(6, others[58])

    def check() -> None:
        assert {_nearest(index, vectors[4]), _nearest(index, others[0])}.isdisjoint({4, 1000})
        assert [_nearest(index, others[place]) for place in (55, 57, 58)] == [5, 2000, 6]
        assert _nearest(index, vectors[5]) != 5
        assert len(index) == len(index.numbers()) == len(set(index.numbers().tolist())) == entries

    check()
    before = index.rebuilds
    gate.open()
    builds.join()
    assert index.rebuilds > before
    check()


def test_one_rebuild_is_asked_for_however_much_changes_meanwhile() -> None:
    asked: list[ClusteredIndex] = []
    index = ClusteredIndex(WIDTH, SETTINGS, on_due=asked.append)
    for number, vector in enumerate(_random(300)):
        index.add(number, vector)
    assert len(asked) == 1


def test_what_is_due_again_after_a_rebuild_is_rebuilt_too(builds: _Builds, gate: _Gate) -> None:
    index = ClusteredIndex(WIDTH, SETTINGS, on_due=builds)
    for number, vector in enumerate(_random(900)):
        index.add(number, vector)
    assert gate.reached.wait(EVENTUALLY_S)
    gate.open()
    builds.join()
    assert index.listed == 900
    assert index.rebuilds == 2, "the first one was made for what there was when it began"


def test_a_rebuild_ends_with_its_index(builds: _Builds, gate: _Gate) -> None:
    index = ClusteredIndex(WIDTH, SETTINGS, on_due=builds)
    for number, vector in enumerate(_random(200)):
        index.add(number, vector)
    assert gate.reached.wait(EVENTUALLY_S)
    index.close()
    gate.open()
    builds.join()
    assert index.listed == 0
    with pytest.raises(LookupError):
        index.add(1, _random(1)[0])


def test_after_a_failed_rebuild_everything_is_still_found_and_the_next_one_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, vectors = ClusteredIndex(WIDTH, SETTINGS, on_due=ClusteredIndex.rebuild), _random(260)
    monkeypatch.setattr(clustered_index, "centres_of", _fail)
    asked = 0
    for number, vector in enumerate(vectors):
        try:
            index.add(number, vector)
        except MemoryError:
            asked += 1
        assert _nearest(index, vector) == number
    assert asked == 1
    monkeypatch.undo()
    index.rebuild()
    assert index.listed == 260


def _fail(*_: object, **__: object) -> object:
    raise MemoryError
