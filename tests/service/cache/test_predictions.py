"""The match predictor in a store: it learns from its searches, and spares those that would find nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from bottega.v1 import cache_pb2
from tests.support.cached_latents import WIDTH, Vector, question, record, running, written
from tests.support.waiting import wait_until

_CHANCE = np.random.default_rng(0)
_CENTRE = _CHANCE.standard_normal(WIDTH)
_ENTRIES = 600


def _near(centre: np.ndarray) -> Vector:
    return np.asarray(centre + 0.1 * _CHANCE.standard_normal(WIDTH), np.float32)


def _far() -> Vector:
    return np.asarray(-_CENTRE + 0.5 * _CHANCE.standard_normal(WIDTH), np.float32)


def test_searches_that_would_find_nothing_are_spared_where_that_pays(tmp_path: Path) -> None:
    with running(tmp_path, predictor=True, max_waiting=_ENTRIES, batch_share=0.0) as store:
        for seed in range(_ENTRIES):
            record(store, _near(_CENTRE), seed=seed, steps=(5,))
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
        assert store.ask(question(), _near(_CENTRE)).header.hits, "what is predicted to be found is searched"


def test_a_predictor_that_would_lose_hits_spares_nothing(tmp_path: Path) -> None:
    with running(tmp_path, predictor=True) as store:
        record(store, np.asarray(_CENTRE, np.float32))
        written(store)
        for _ in range(50):
            assert store.ask(question(step_s=1.0), np.asarray(_CENTRE, np.float32)).header.hits
        found = store.statistics().predictor
        assert found is not None
        assert (found.on, found.skipped) == (False, 0)
