"""Which cache has an entry: shares of several caches, moves when one joins or leaves, and hits that boundaries cost."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.addons.cache.placement import CELLS, cell_of, placement_key
from bottega.addons.interface.store_link import rank_stores

NAMES = ("cache-a", "cache-b", "cache-c")
WIDTH = 256
KEYS = [f"{number:064x}" for number in range(200)]


def _vectors(count: int, *, cone: float = 0.0, seed: int = 0) -> NDArray[np.float32]:
    """Random vectors, [count, WIDTH], around a common direction of this length."""
    chance = np.random.default_rng(seed)
    common = cone * chance.standard_normal(WIDTH)
    return (common + chance.standard_normal((count, WIDTH))).astype(np.float32)


def _owners(names: tuple[str, ...]) -> list[str]:
    return [rank_stores(names, f"{key}/{cell}")[0] for key, cell in itertools.product(KEYS, range(CELLS))]


def test_every_cache_has_about_an_equal_share() -> None:
    shares = Counter(_owners(NAMES))
    assert set(shares) == set(NAMES)
    assert all(0.30 < share / len(KEYS) / CELLS < 0.37 for share in shares.values())


def test_a_cache_that_joins_takes_its_share_and_nothing_else_moves() -> None:
    before, after = _owners(NAMES), _owners((*NAMES, "cache-d"))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"cache-d"}
    assert 0.22 < len(moved) / len(before) < 0.28


@pytest.mark.parametrize("cone", [0.0, 0.8], ids=["all round", "in a cone"])
def test_one_key_is_spread_over_all_caches(cone: float) -> None:
    """Embeddings of many models lie in a cone: with 0.8, the cosine of two random ones is .39."""
    largest = []
    for seed in range(8):
        vectors = _vectors(500, cone=cone, seed=seed)
        owners = Counter(rank_stores(NAMES, placement_key(KEYS[seed], vector))[0] for vector in vectors)
        assert set(owners) == set(NAMES)
        largest.append(max(owners.values()) / len(vectors))
    assert np.mean(largest) < 0.6


@pytest.mark.parametrize(("cosine", "least"), [(0.96, 0.7), (0.99, 0.85), (0.999, 0.93)])
def test_similar_prompts_mostly_share_a_cell(cosine: float, least: float) -> None:
    """The bounds are for vectors all round, of which the most lie near a boundary."""
    vectors, others = _vectors(2000), _vectors(2000, seed=1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    others -= (others * vectors).sum(axis=1, keepdims=True) * vectors
    others /= np.linalg.norm(others, axis=1, keepdims=True)
    near = (cosine * vectors + np.sqrt(1 - cosine**2) * others).astype(np.float32)
    same = [cell_of(one) == cell_of(other) for one, other in zip(vectors, near, strict=True)]
    assert np.mean(same) > least


def test_cells_are_the_same_in_every_version() -> None:
    """Workers of two versions share caches, so a change would cost most hits while an upgrade runs."""
    cells = bytes(cell_of(vector) for vector in np.eye(768, dtype=np.float32)[:64] + np.float32(0.001))
    assert hashlib.sha256(cells).hexdigest()[:16] == "a2166d52ecd7485e"
    assert rank_stores(NAMES, f"{KEYS[0]}/0") == ["cache-a", "cache-c", "cache-b"]
