"""Every index of vectors against a plain comparison with all of them, whatever was added, replaced and removed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.index.device_index import DeviceIndex, MakeIndex, indexes_on
from bottega.cache.index.key_index import FlatIndex, KeyIndex
from bottega.cache.index.sketched_index import SketchedIndex
from bottega.cache.index.vector_index import IndexSettings, VectorIndex, unit_vectors
from bottega.errors import ConfigError, StorageUnavailable

WIDTH = 16
# Half precision changes a cosine by no more.
TOLERANCE = 5e-4


def _cuda_indexes() -> MakeIndex:
    try:
        return indexes_on("cuda")
    except ConfigError as error:
        pytest.skip(f"there is no FAISS with a CUDA device here: {error.message}")


BACKENDS: dict[str, Callable[[], VectorIndex]] = {
    "flat": lambda: FlatIndex(WIDTH),
    "sketched": lambda: SketchedIndex(np.zeros(WIDTH, np.float32), IndexSettings()),
    "of a device, here of the CPU": lambda: DeviceIndex(WIDTH, faiss.IndexFlatIP),
    "of a CUDA device": lambda: DeviceIndex(WIDTH, _cuda_indexes()),
    "of a key, still flat": lambda: KeyIndex(WIDTH, IndexSettings()),
    "of a key": lambda: KeyIndex(WIDTH, IndexSettings(flat_entries=100)),
    "of a key, on a device": lambda: KeyIndex(
        WIDTH, IndexSettings(flat_entries=100, make_device_index=faiss.IndexFlatIP)
    ),
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


def test_removed_rows_of_a_device_hide_nothing_and_are_dropped() -> None:
    """A device finds at most 2,048 rows of a search: here more than that were removed, all nearer than the others."""
    made: list[faiss.IndexFlatIP] = []

    def make(width: int) -> faiss.IndexFlatIP:
        made.append(faiss.IndexFlatIP(width))
        return made[-1]

    index = DeviceIndex(WIDTH, make)
    wanted = _random(1)[0]
    near, far = unit_vectors(wanted + 0.01 * _random(2500)), _random(9000, seed=1)
    index.add_all(np.arange(2500), near)
    index.add_all(np.arange(2500, 11500), far)
    for number in range(2500):
        index.remove(number)
    best = np.argsort(-(far @ wanted))[:20] + 2500
    assert made[0].ntotal == 11500
    assert [match.number for match in index.search(wanted, 20)] == best.tolist()
    assert made[0].ntotal == 9000


def test_a_device_that_fails_is_reported_and_loses_nothing() -> None:
    class Failing(faiss.IndexFlatIP):
        def add(self, x: Any) -> None:
            if self.ntotal == 3:
                raise RuntimeError("Error in GpuResources\nCUDA error 2 out of memory")
            super().add(x)

    index = DeviceIndex(WIDTH, Failing)
    vectors = _random(4)
    for number in range(3):
        index.add(number, vectors[number])
    for number in (3, 1):
        with pytest.raises(
            StorageUnavailable, match="the device of the cache's index fails: CUDA error 2 out of memory"
        ):
            index.add(number, vectors[3])
    assert sorted(match.number for match in index.search(vectors[1], 4)) == [0, 1, 2]
    assert index.search(vectors[1], 1)[0].number == 1


@pytest.mark.parametrize(
    ("devices", "text"),
    [(None, "not made for CUDA: pip uninstall faiss-cpu"), (1, "index.device is cuda:1, but FAISS finds 1 CUDA")],
)
def test_a_device_that_is_not_there_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, devices: int | None, text: str
) -> None:
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    if devices is not None:
        monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
        monkeypatch.setattr(faiss, "get_num_gpus", lambda: devices, raising=False)
    with pytest.raises(ConfigError, match=text):
        indexes_on("cuda:1")
