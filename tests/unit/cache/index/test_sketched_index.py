"""An index that compares sketches first: what it finds among many, and that rows of all its blocks stay in order."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.index import sketched_index
from bottega.cache.index.key_index import KeyIndex
from bottega.cache.index.sketched_index import CODE_BYTES, SketchedIndex, Sketcher
from bottega.cache.index.vector_index import IndexSettings, unit_vectors

WIDTH = 64
BLOCK_ROWS = 50


def _random(count: int, seed: int = 0, width: int = WIDTH) -> NDArray[np.float32]:
    return unit_vectors(np.random.default_rng(seed).standard_normal((count, width)))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketched_index, "_BLOCK_ROWS", BLOCK_ROWS)


def _index(settings: IndexSettings | None = None) -> SketchedIndex:
    return SketchedIndex(np.zeros(WIDTH, np.float32), settings or IndexSettings())


def test_the_share_of_planes_between_two_vectors_is_their_angle() -> None:
    vectors = _random(400, width=768)
    cosines = np.linspace(-0.9, 0.95, 200)
    others = unit_vectors(vectors[:200] * cosines[:, None] + vectors[200:] * np.sqrt(1 - cosines**2)[:, None])
    sketcher = Sketcher(np.zeros(768, np.float32))
    differ = np.unpackbits(sketcher.codes(vectors[:200]) ^ sketcher.codes(others), axis=1).mean(axis=1)
    angles = np.arccos(np.sum(vectors[:200] * others, axis=1)) / np.pi
    assert np.abs(differ - angles).max() < 0.13
    assert abs(float(np.mean(differ - angles))) < 0.01


def test_planes_go_through_the_middle_of_what_there_is() -> None:
    """In a narrow cone sketches from the origin would hardly differ."""
    cone = unit_vectors(3.0 * _random(1)[0] + _random(500, seed=1))
    shares = []
    for centre in (np.zeros(WIDTH, np.float32), cone.mean(axis=0)):
        bits = np.unpackbits(Sketcher(centre).codes(cone), axis=1).mean(axis=0)
        shares.append(float(np.mean((bits > 0.2) & (bits < 0.8))))
    assert shares[0] < 0.5 < 0.95 < shares[1]


def test_an_edit_of_a_prompt_is_found_in_a_crowded_topic() -> None:
    """Where lists and graphs missed it: everything has the same topic, and nothing but the session is near."""
    width, count = 256, 20_000
    topic = _random(1, width=width)[0]
    sessions = unit_vectors(topic + 0.9 * _random(count, seed=1, width=width))
    index = KeyIndex(width, IndexSettings())
    index.add_all(np.arange(count), sessions)
    assert index.sketched == count
    wanted = unit_vectors(sessions[:200] + 0.3 * _random(200, seed=2, width=width))
    nearest = np.argmax(wanted @ sessions.T, axis=1)
    found = [index.search(each, 1)[0].number for each in wanted]
    assert np.mean(np.array(found) == nearest) > 0.99
    few = SketchedIndex(sessions.mean(axis=0), IndexSettings(candidates=1))
    few.add_all(np.arange(count), sessions)
    assert len(few.search(wanted[0], 64)) == 64, "as many as may be asked for are always compared"


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_all_blocks_stay_in_order() -> None:
    index, rng = _index(), np.random.default_rng(3)
    vectors = _random(1000)
    index.add_all(np.arange(330), vectors[:330])
    kept = set(range(330))
    for number in rng.permutation(1000).tolist():
        if rng.random() < 0.5:
            assert index.add(number, vectors[number]) is (number not in kept)
            kept.add(number)
        else:
            assert index.remove(number) is (number in kept)
            kept.discard(number)
        assert len(index) == len(kept)
    assert set(index.numbers().tolist()) == kept
    for number in kept:
        found = index.search(vectors[number], 1)[0]
        assert found.number == number
        assert found.similarity == pytest.approx(1.0, abs=1e-3)
    here, copies = index.vectors(np.array([*kept, 5000]))
    assert set(here.tolist()) == kept
    np.testing.assert_allclose(copies, vectors[here], atol=1e-3)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_go_with_their_rows() -> None:
    index, vectors = _index(), _random(8 * BLOCK_ROWS)
    index.add_all(np.arange(len(vectors)), vectors)
    assert len(index._blocks) == 8
    full = index.size_bytes
    assert full > len(vectors) * (2 * WIDTH + CODE_BYTES)
    for number in range(7 * BLOCK_ROWS):
        index.remove(number)
    assert len(index._blocks) == 2, "its own, and one that is empty"
    assert index.size_bytes == full / 8
    assert index.search(vectors[-1], 1)[0].number == len(vectors) - 1
