"""Predicts whether a search will find anything, and skips searches that would not, if that pays.

Each key with enough entries has a model of its entries' embeddings, which is trained in the background, again whenever
a share of the entries has changed. `bottega.addons.cache.planning.predictor_use` decides from measurements whether
predictions are used. Source: Nirvana (NSDI'24), section 5.2.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.addons.cache.planning.predictor_use import PredictorRates, PredictorSwitch
from bottega.cache.index.vector_index import Vectors, unit_vectors
from bottega.cache.predictor.one_class import OneClassModel, train
from bottega.storage import SerialThread

# Threads that answer requests go first on the same core. It is not higher, because training must still make progress on
# a busy machine while it holds a lock.
_NICENESS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorSettings:
    """Settings of a MatchPredictor."""

    least_entries: int = 500
    """Number of entries from which a key has a model."""
    changed_share: float = 0.05
    """Share of a key's entries after whose change its model is trained again (5 % in the paper)."""
    most_records: int = 10_000
    """Maximum number of embeddings that a model is trained on."""
    most_models: int = 64
    """Maximum number of models; the first keys get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPrediction:
    """The prediction of a search."""

    hit: bool
    """Whether the search will find something."""
    weight: float
    """0 to skip the search, else the number of questions for which it counts."""
    measured: bool
    """Whether a model made the prediction, so that its result should be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorStatistics:
    """Figures of a predictor. All but `on`, `rates` and `training_s` are counts."""

    on: bool
    """Whether searches with a predicted miss are skipped."""
    rates: PredictorRates
    models: int
    trainings: int
    training_s: float
    """Seconds of the last training."""
    predicted_hits: int
    predicted_misses: int
    skipped: int
    """Number of skipped searches."""


@dataclass(slots=True, kw_only=True)
class _Key:
    """The state of a key's model."""

    entries: int = 0
    """Number of entries at the last training."""
    changes: int = 0
    """Number of changes since then."""
    training: bool = False
    model: OneClassModel | None = None


class MatchPredictor:
    """Predicts before a search whether it will find nothing, by a model of each key's entries. Close it.

    Any thread may call it.

    Args:
        sample: Returns up to a number of embeddings of a key's entries (`KeyedIndex.sample`); called in another thread.
    """

    def __init__(
        self,
        sample: Callable[[str, int], Vectors],
        *,
        settings: PredictorSettings | None = None,
        switch: PredictorSwitch | None = None,
    ) -> None:
        self._sample = sample
        self._settings = settings or PredictorSettings()
        self._switch = switch or PredictorSwitch()
        self._lock = threading.Lock()
        self._keys: dict[str, _Key] = {}
        self._trainer = SerialThread("predictor-training", niceness=_NICENESS)
        self._trainings = 0
        self._training_s = 0.0
        self._predicted_hits = self._predicted_misses = self._skipped = 0

    def changed(self, key: str, *, entries: int, changes: int = 1) -> None:
        """Record that `changes` entries of a key were added or removed; it now has `entries`.

        The key's model is trained in the background when that is due.
        """
        with self._lock:
            if entries < self._settings.least_entries:
                self._keys.pop(key, None)
                return
            if key not in self._keys and len(self._keys) >= self._settings.most_models:
                return
            known = self._keys.setdefault(key, _Key())
            known.changes += changes
            due = known.model is None or known.changes >= self._settings.changed_share * known.entries
            if known.training or not due:
                return
            known.training, known.changes, known.entries = True, 0, entries
        self._trainer.post(lambda: self._train(key, known))

    def predict(self, key: str, vector: NDArray[np.floating]) -> MatchPrediction:
        """Return whether a search of a key will find something, and whether to make it. Call it before each search.

        Raises ValueError like a search.
        """
        wanted = unit_vectors(vector)
        with self._lock:
            known = self._keys.get(key)
            model = None if known is None else known.model
        if model is None or model.width != len(wanted):
            return MatchPrediction(hit=True, weight=1.0, measured=False)
        hit = model.contains(wanted)
        with self._lock:
            weight = self._switch.weight(hit)
            self._predicted_hits += hit
            self._predicted_misses += not hit
            self._skipped += weight == 0.0
        return MatchPrediction(hit=hit, weight=weight, measured=True)

    def record(self, prediction: MatchPrediction, *, hit: bool, lookup_s: float, saved_s: float | None) -> None:
        """Record the result of a search that followed a prediction.

        Args:
            lookup_s: Duration of the search.
            saved_s: Seconds that its hit saves, if known.
        """
        if prediction.measured and prediction.weight > 0.0:
            with self._lock:
                self._switch.record(
                    prediction.weight, predicted_hit=prediction.hit, hit=hit, lookup_s=lookup_s, saved_s=saved_s
                )

    def statistics(self) -> PredictorStatistics:
        """Return the current figures."""
        with self._lock:
            return PredictorStatistics(
                on=self._switch.on,
                rates=self._switch.rates,
                models=sum(known.model is not None for known in self._keys.values()),
                trainings=self._trainings,
                training_s=self._training_s,
                predicted_hits=self._predicted_hits,
                predicted_misses=self._predicted_misses,
                skipped=self._skipped,
            )

    def close(self) -> None:
        """Wait for a running training and stop. It may be called again."""
        self._trainer.end(drop_waiting=True)

    def _train(self, key: str, known: _Key) -> None:
        """Train the model of a key, unless too few of its entries are left."""
        try:
            vectors = self._sample(key, self._settings.most_records)
            if len(vectors) < self._settings.least_entries:
                return
            began = time.perf_counter()
            model = train(vectors)
            spent_s = time.perf_counter() - began
            with self._lock:
                known.model = model
                self._trainings += 1
                self._training_s = spent_s
        finally:
            with self._lock:
                known.training = False
