"""Predicts whether a search will find anything, and spares those that would not, where that pays.

For each key with enough entries there is a model of what its entries' embeddings look like; it is trained in the
background, anew when some share of the entries changed. `bottega.planning.predictor_use` decides from what is measured
whether the models are believed. Source: Nirvana (NSDI'24), section 5.2.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bottega.cache.background_thread import BackgroundThread
from bottega.cache.index.vector_index import Vectors, unit_vectors
from bottega.cache.predictor.one_class import OneClassModel, train
from bottega.planning.predictor_use import PredictorRates, PredictorSwitch


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorSettings:
    """least_entries: of a key that has a model. changed_share: of a key's entries, after which it is trained anew (5 %
    in the paper). most_records: that one is trained on. most_models: of the keys that asked for one first."""

    least_entries: int = 500
    changed_share: float = 0.05
    most_records: int = 10_000
    most_models: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPrediction:
    """hit: whether a search will find something. weight: 0 where there should be none, else as the switch says.

    measured: whether a model said so, whose word is worth recording.
    """

    hit: bool
    weight: float
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorStatistics:
    """on: whether predicted misses are spared their searches. training_s: of the last training. The others are counts:
    skipped is of the searches that were spared."""

    on: bool
    rates: PredictorRates
    models: int
    trainings: int
    training_s: float
    predicted_hits: int
    predicted_misses: int
    skipped: int


class Predictor(Protocol):
    """Says before a search whether it will be in vain. Any thread may call it."""

    def changed(self, key: str, *, entries: int, changes: int = 1) -> None:
        """So many entries of a key have come or gone. entries: that it has now."""
        ...

    def predict(self, key: str, vector: NDArray[np.floating]) -> MatchPrediction:
        """Whether a search of a key will find something, and whether to make it. Raises ValueError as a search does."""
        ...

    def record(self, prediction: MatchPrediction, *, hit: bool, lookup_s: float, saved_s: float | None) -> None:
        """What the search found that was made after a prediction. lookup_s: of it. saved_s: by its hit, if known."""
        ...

    def statistics(self) -> PredictorStatistics:
        """As they are now."""
        ...

    def close(self) -> None:
        """Ends what it does in the background. May be called again."""
        ...


@dataclass(slots=True, kw_only=True)
class _Key:
    """entries: when it was trained last. changes: since then."""

    entries: int = 0
    changes: int = 0
    training: bool = False
    model: OneClassModel | None = None


class MatchPredictor:
    """A `Predictor` with a model of each key's entries. Close it.

    sample: up to so many embeddings of a key's entries (`KeyedIndex.sample`); called in a thread of its own.
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
        self._trainer = BackgroundThread("predictor-training")
        self._trainings = 0
        self._training_s = 0.0
        self._predicted_hits = self._predicted_misses = self._skipped = 0

    def changed(self, key: str, *, entries: int, changes: int = 1) -> None:
        """So many entries of a key have come or gone. entries: that it has now.

        Trains its model in the background when due.
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
        self._trainer.start(lambda: self._train(key, known))

    def predict(self, key: str, vector: NDArray[np.floating]) -> MatchPrediction:
        """Whether a search of a key will find something, and whether to make it. Ask before each search.

        Raises ValueError where a search would.
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
        """What the search found that was made after a prediction. lookup_s: of it. saved_s: by its hit, if known."""
        if prediction.measured and prediction.weight > 0.0:
            with self._lock:
                self._switch.record(
                    prediction.weight, predicted_hit=prediction.hit, hit=hit, lookup_s=lookup_s, saved_s=saved_s
                )

    def statistics(self) -> PredictorStatistics:
        """As they are now."""
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
        """Ends after a training that is under way. May be called again."""
        self._trainer.close()

    def _train(self, key: str, known: _Key) -> None:
        """known: of the key, if it still has that."""
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
