"""The cache bench: thresholds that hit as often as they should, and a replay that a real store answers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.planning import FIFO, LCBFU, PredictorRates
from load.bench.cache import vs_best_other
from load.bench.cache_predictor import Predicted
from load.bench.cache_replay import STEPS, Replayed, profile, replay
from load.bench.cache_thresholds import NIRVANA_HITS, nearest_recorded, thresholds
from load.bench.cache_throughput import Timed

WIDTH = 16


def _vectors(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Around a few centres, some of them nearer than others."""
    chance = np.random.default_rng(seed)
    centres = chance.standard_normal((20, WIDTH))
    spread = chance.uniform(0.01, 0.6, (count, 1))
    made = centres[chance.integers(0, 20, count)] + spread * chance.standard_normal((count, WIDTH))
    return np.asarray(made / np.linalg.norm(made, axis=1, keepdims=True), np.float32)


def test_the_figures_of_the_paper_are_those_that_are_known() -> None:
    assert sum(NIRVANA_HITS.values()) == pytest.approx(0.93, abs=1e-4)
    assert sum(fraction * share for fraction, share in NIRVANA_HITS.items()) == pytest.approx(0.23, abs=1e-4)
    shares = [NIRVANA_HITS[fraction] for fraction in (0.1, 0.2, 0.3, 0.4)]
    ratios = [later / earlier for earlier, later in pairwise(shares)]
    assert ratios == pytest.approx([0.807] * 3, abs=1e-3)


def test_what_is_similar_to_something_recorded_is_not_recorded_itself() -> None:
    vectors = np.asarray([[1, 0], [0.8, 0.6], [0, 1], [0.8, 0.6]], np.float32)
    strict, lax = nearest_recorded(vectors, 0.99), nearest_recorded(vectors, 0.7)
    assert (strict.recorded, lax.recorded) == (3, 2)
    assert strict.similarities == pytest.approx([-1, 0.8, 0.6, 1.0])
    assert lax.similarities == pytest.approx([-1, 0.8, 0.0, 0.8])


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


def test_lcbfu_is_compared_with_the_best_of_the_others(tmp_path: Path) -> None:
    statistics = replay(tmp_path, _vectors(1), profile({0.1: 0.9}), policy=LCBFU, latents=5).statistics
    found: dict[tuple[int, str], Replayed] = {}
    for name, hits in (("lcbfu", 6), ("lru", 4), ("lfu", 5), ("fifo", 3)):
        one = Replayed(prompts=10, statistics=statistics)
        one.by_step[25] = hits
        found[15, name] = one
    assert vs_best_other(found, 15) == pytest.approx(6 / 5)


def test_a_predictor_breaks_even_where_the_rule_says() -> None:
    outcomes = Counter({(True, True): 85, (False, True): 5, (False, False): 4, (True, False): 6})
    predicted = Predicted(outcomes=outcomes, on=0.0, lookup_s=0.001)
    assert [predicted.hit_rate, predicted.recall, predicted.specificity] == pytest.approx([0.9, 85 / 90, 0.4])
    assert predicted.precision == pytest.approx(85 / 91)
    assert predicted.break_even == pytest.approx((0.9 * 5 / 90) / (0.1 * 0.4))
    for factor in (0.99, 1.01):
        rates = PredictorRates(
            hit_rate=predicted.hit_rate,
            recall=predicted.recall,
            specificity=predicted.specificity,
            precision=predicted.precision,
            lookup_s=factor * predicted.break_even * 2.0,
            saved_s=2.0,
        )
        assert rates.pays is (factor > 1)


def test_the_suite_is_compared_with_what_the_saved_steps_would_give() -> None:
    timed = Timed(without=[1.0] * 4, with_cache=[1.0, 0.8, 0.8, 0.6], skipped=[0, 10, 10, 20])
    assert timed.saved == pytest.approx(0.2)
    assert timed.throughput_ratio == pytest.approx(4.0 / 3.2)
    assert timed.wanted_ratio == pytest.approx(0.97 / 0.8)
    assert timed.p99_over_median == pytest.approx(1.25)
