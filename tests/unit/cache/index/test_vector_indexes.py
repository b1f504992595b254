"""Every index of vectors against a plain comparison with all of them, whatever was added, replaced and removed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.index.key_index import FlatIndex, KeyIndex
from bottega.cache.index.sketched_index import SketchedIndex
from bottega.cache.index.vector_index import IndexSettings, VectorIndex, unit_vectors

WIDTH = 16
# Half precision changes a cosine by no more.
TOLERANCE = 5e-4


BACKENDS: dict[str, Callable[[], VectorIndex]] = {
    "flat": lambda: FlatIndex(WIDTH),
    "sketched": lambda: SketchedIndex(np.zeros(WIDTH, np.float32), IndexSettings()),
    "of a key, still flat": lambda: KeyIndex(WIDTH, IndexSettings()),
    "of a key": lambda: KeyIndex(WIDTH, IndexSettings(flat_entries=100)),
}


@pytest.fixture(params=BACKENDS)
def index(request: pytest.FixtureRequest) -> VectorIndex:
    return BACKENDS[request.param]()


def _random(count: int, seed: int = 0) -> NDArray[np.float32]:
    return unit_vectors(np.random.default_rng(seed).standard_normal((count, WIDTH)))


def _check(index: VectorIndex, kept: dict[int, NDArray[np.float32]]) -> None:
    """That searches find what a comparison with each of the kept vectors finds."""
    assert len(index) == len(kept)
    assert sorted(index.numbers().tolist()) == sorted(kept)
    numbers, vectors = list(kept), np.array(list(kept.values()))
    for wanted in _random(20, seed=9):
        similarities = vectors @ wanted
        found = index.search(wanted, 5)
        assert [match.similarity for match in found] == pytest.approx(sorted(similarities)[:-6:-1], abs=TOLERANCE)
        for match in found:
            assert match.similarity == pytest.approx(similarities[numbers.index(match.number)], abs=TOLERANCE)


def test_the_nearest_are_found_after_any_changes(index: VectorIndex) -> None:
    rng = np.random.default_rng(1)
    kept: dict[int, NDArray[np.float32]] = {}
    for vector in _random(600):
        number = int(rng.integers(400))
        assert index.add(number, vector) is (number not in kept)
        kept[number] = vector
        if rng.random() < 0.3:
            gone = int(rng.integers(400))
            assert index.remove(gone) is (kept.pop(gone, None) is not None)
    _check(index, kept)


def test_nothing_is_found_where_nothing_is(index: VectorIndex) -> None:
    vectors = _random(150)
    assert index.search(vectors[0], 3) == []
    for number, vector in enumerate(vectors):
        index.add(number, vector)
    assert all(index.remove(number) for number in range(150))
    assert index.search(vectors[0], 3) == []
    assert len(index) == 0


def test_fewer_are_found_where_there_are_fewer(index: VectorIndex) -> None:
    vectors = _random(3)
    for number, vector in enumerate(vectors):
        index.add(number, vector)
    assert {match.number for match in index.search(vectors[1], 10)} == {0, 1, 2}


def test_a_vector_is_given_back(index: VectorIndex) -> None:
    vectors = _random(250)
    for number, vector in enumerate(vectors):
        index.add(number, vector)
    index.add(7, vectors[8])
    index.remove(9)
    found = index.vector(7)
    assert found is not None
    np.testing.assert_allclose(found, vectors[8], atol=TOLERANCE)
    assert index.vector(9) is None
    assert index.vector(1000) is None


def test_equal_vectors_are_all_found(index: VectorIndex) -> None:
    """Pictures of one prompt have one embedding."""
    vectors = _random(40)
    for number in range(800):
        index.add(number, vectors[number % 40])
    for place, vector in enumerate(vectors):
        assert {match.number % 40 for match in index.search(vector, 20)} == {place}
