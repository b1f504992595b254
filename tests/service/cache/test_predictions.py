"""The match predictor in a store: it learns from its searches, and spares those that would find nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bottega.cache.index.key_index import KeyedIndex
from bottega.v1 import cache_pb2
from tests.support.cached_latents import KEY, WIDTH, Vector, question, record, running, written
from tests.support.waiting import wait_until

_CHANCE = np.random.default_rng(0)
_CENTRE = _CHANCE.standard_normal(WIDTH)
# One fewer than a model needs.
_ENTRIES = 499


def _near(count: int) -> np.ndarray:
    return np.asarray(_CENTRE + 0.1 * _CHANCE.standard_normal((count, WIDTH)), np.float32)


def _far() -> Vector:
    return np.asarray(-_CENTRE + 0.5 * _CHANCE.standard_normal(WIDTH), np.float32)


def test_searches_that_would_find_nothing_are_spared_where_that_pays(tmp_path: Path) -> None:
    index = KeyedIndex()
    index.load(KEY, np.arange(1, 1 + _ENTRIES), _near(_ENTRIES))  # as many recordings leave it
    with running(tmp_path, index=index, predictor=True) as store:
        record(store, np.asarray(_CENTRE, np.float32), seed=7, steps=(5,))
        written(store)

        def models() -> int:
            found = store.statistics().predictor
            assert found is not None
            return found.models

        wait_until(lambda: models() == 1, "the predictor to be trained")
        # Misses alone: nothing is lost by sparing them.
        outcomes = [store.ask(question(step_s=1e-9), _far()).header.outcome for _ in range(400)]
        found = store.statistics().predictor
        assert found is not None
        assert found.on
        assert cache_pb2.CACHE_OUTCOME_PREDICTED_MISS not in outcomes[:200]
        assert outcomes[200:].count(cache_pb2.CACHE_OUTCOME_PREDICTED_MISS) > 100
        assert store.statistics().lookups["predicted_miss"] == found.skipped
        assert store.ask(question(), np.asarray(_CENTRE, np.float32)).header.hits, (
            "what is predicted to hit is searched"
        )
