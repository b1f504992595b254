"""The cache bench: thresholds that hit as often as they should, and a replay that a real store answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.eviction import FIFO, LCBFU
from load.bench.cache_stream import STEPS, profile, replay, thresholds

WIDTH = 16


def _vectors(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Around a few centres, some of them nearer than others."""
    chance = np.random.default_rng(seed)
    centres = chance.standard_normal((20, WIDTH))
    spread = chance.uniform(0.01, 0.6, (count, 1))
    made = centres[chance.integers(0, 20, count)] + spread * chance.standard_normal((count, WIDTH))
    return np.asarray(made / np.linalg.norm(made, axis=1, keepdims=True), np.float32)


def test_with_its_thresholds_a_stream_is_hit_as_often_as_wanted(tmp_path: Path) -> None:
    vectors = _vectors(400)
    wanted = {0.1: 0.3, 0.2: 0.25, 0.3: 0.15, 0.4: 0.1, 0.5: 0.05}
    found = thresholds(vectors, wanted)
    assert list(found.values()) == sorted(found.values())
    replayed = replay(tmp_path / "store", vectors, profile(found), policy=LCBFU, latents=10_000)
    shares = {fraction: replayed.by_step[round(fraction * STEPS)] / 400 for fraction in wanted}
    assert shares == pytest.approx(wanted, abs=0.01)
    assert replayed.hit_rate == pytest.approx(0.85, abs=0.01)
    assert replayed.saved == pytest.approx(sum(fraction * share for fraction, share in wanted.items()), abs=0.004)
    assert replayed.statistics.evictions == 0


def test_a_small_store_evicts_and_saves_less(tmp_path: Path) -> None:
    vectors = _vectors(40)
    measured = profile({0.1: 0.9, 0.5: 0.99})
    large = replay(tmp_path / "large", vectors, measured, policy=FIFO, latents=2000)
    small = replay(tmp_path / "small", vectors, measured, policy=FIFO, latents=10)
    assert small.statistics.evictions > 0
    assert small.saved < large.saved
    assert small.statistics.bytes <= small.statistics.budget_bytes
