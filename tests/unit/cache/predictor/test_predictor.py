"""The match predictor: when it has a model, when that is trained anew, and when searches are spared."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.addons.cache.skip_profile import PredictorSwitch
from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.index.vector_index import unit_vectors
from bottega.cache.predictor import MatchPrediction, MatchPredictor, PredictorSettings
from tests.support.waiting import EVENTUALLY_S, wait_until

WIDTH = 32
SETTINGS = PredictorSettings(least_entries=200, most_records=400, most_models=2)


class _Store:
    """An index with its predictor, as a store keeps them."""

    def __init__(self) -> None:
        self.index = KeyedIndex()
        self.predictor = MatchPredictor(
            self._sample,
            settings=SETTINGS,
            switch=PredictorSwitch(half_life=100, probe_every=10, least_lookups=50),
        )
        self._number = 0

    def fill(self, key: str, count: int, *, wait: bool = True) -> None:
        for vector in _near(count, seed=self._number):
            self.index.add(key, self._number, vector)
            self.predictor.changed(key, entries=self.index.entries(key))
            self._number += 1
        if wait:
            wait_until(lambda: self.predictor.predict(key, _near(1, seed=1)[0]).measured, "a model")

    def _sample(self, key: str, count: int) -> NDArray[np.float32]:
        """Return entries in one order, because the model depends on it: one in a hundred misses the bounds below."""
        sampled = self.index.sample(key, count)
        return sampled[np.lexsort(sampled.T)]

    def ask(self, vector: NDArray[np.float32], *, hit: bool, lookup_s: float, saved_s: float) -> MatchPrediction:
        prediction = self.predictor.predict("key", vector)
        if prediction.weight > 0.0:
            self.predictor.record(prediction, hit=hit, lookup_s=lookup_s, saved_s=saved_s)
        return prediction


@pytest.fixture
def store() -> Iterator[_Store]:
    made = _Store()
    yield made
    made.predictor.close()
    made.index.close()


def _near(count: int, *, seed: int) -> NDArray[np.float32]:
    """What is there, and what will be found."""
    middle = np.random.default_rng(99).standard_normal((3, WIDTH))
    rng = np.random.default_rng(seed)
    return unit_vectors(middle[rng.integers(3, size=count)] + 0.3 * rng.standard_normal((count, WIDTH)))


def _far(count: int, *, seed: int = 0) -> NDArray[np.float32]:
    return unit_vectors(np.random.default_rng(seed).standard_normal((count, WIDTH)))


def test_without_enough_entries_everything_is_searched_and_nothing_measured(store: _Store) -> None:
    store.fill("key", 199, wait=False)
    prediction = store.ask(_far(1)[0], hit=False, lookup_s=1.0, saved_s=1.0)
    assert (prediction.hit, prediction.weight, prediction.measured) == (True, 1.0, False)
    assert store.predictor.statistics().rates.lookup_s == 0.0


def test_misses_are_predicted_while_the_switch_is_off_and_searched_all_the_same(store: _Store) -> None:
    store.fill("key", 200)
    predictions = [store.predictor.predict("key", vector) for vector in _far(100)]
    assert sum(not prediction.hit for prediction in predictions) > 90
    assert all(prediction.weight == 1.0 for prediction in predictions)
    # The model's offset comes from twenty vectors: in other orders .76 to 1, and .91 on average.
    assert sum(store.predictor.predict("key", vector).hit for vector in _near(100, seed=5)) > 75
    assert store.predictor.statistics().predicted_misses > 90


def test_slow_searches_of_misses_are_spared_and_one_of_some_is_made(store: _Store) -> None:
    store.fill("key", 200)
    for vector in _far(300):
        store.ask(vector, hit=False, lookup_s=1.0, saved_s=0.1)
    statistics = store.predictor.statistics()
    assert statistics.on
    assert statistics.rates.specificity > 0.7
    weights = [store.ask(vector, hit=False, lookup_s=1.0, saved_s=0.1).weight for vector in _far(200, seed=3)]
    assert weights.count(0.0) > 100
    assert weights.count(10.0) >= 8
    assert store.predictor.statistics().skipped >= weights.count(0.0)


def test_it_is_not_believed_where_a_lost_hit_costs_more(store: _Store) -> None:
    store.fill("key", 200)
    for near, far in zip(_near(300, seed=5), _far(300), strict=True):
        store.ask(near, hit=True, lookup_s=0.001, saved_s=10.0)
        store.ask(far, hit=True, lookup_s=0.001, saved_s=10.0)  # a hit all the same
    statistics = store.predictor.statistics()
    assert not statistics.on
    assert statistics.skipped == 0
    assert statistics.rates.recall < 0.8


def test_a_model_is_trained_anew_when_a_twentieth_of_the_entries_changed(store: _Store) -> None:
    store.fill("key", 200)
    wait_until(lambda: store.predictor.statistics().trainings == 1, "the first training")
    store.fill("key", 9)
    assert store.predictor.statistics().trainings == 1
    store.fill("key", 1)
    wait_until(lambda: store.predictor.statistics().trainings == 2, "the second training")
    assert store.predictor.statistics().training_s > 0.0


def test_one_training_at_a_time_and_a_failed_one_is_made_up_for() -> None:
    """The first sampling waits, and then fails."""
    reached, go_on, calls = threading.Event(), threading.Event(), []

    def sample(key: str, count: int) -> NDArray[np.float32]:
        calls.append(key)
        if len(calls) == 1:
            reached.set()
            assert go_on.wait(EVENTUALLY_S)
            raise MemoryError
        return _near(count, seed=0)

    predictor = MatchPredictor(sample, settings=SETTINGS)
    try:
        predictor.changed("key", entries=200)
        assert reached.wait(EVENTUALLY_S)
        for _ in range(20):
            predictor.changed("key", entries=200)
        go_on.set()

        def trained_again() -> bool:
            predictor.changed("key", entries=200)
            return len(calls) > 1

        wait_until(trained_again, "a second training")
        wait_until(lambda: predictor.statistics().models == 1, "a model")
    finally:
        predictor.close()
        predictor.close()


def test_a_key_that_shrinks_loses_its_model_and_there_are_at_most_so_many(store: _Store) -> None:
    store.fill("key", 200)
    store.fill("second", 200)
    store.fill("third", 210, wait=False)
    assert not store.predictor.predict("third", _near(1, seed=1)[0]).measured
    store.predictor.changed("key", entries=199)
    assert not store.predictor.predict("key", _near(1, seed=1)[0]).measured
    store.fill("third", 1)
    assert store.predictor.statistics().models == 2
