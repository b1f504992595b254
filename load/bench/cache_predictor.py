"""How good the cache's match predictor is on a stream of prompts, and when it is worth believing. Index and predictor
are the store's own; no latents."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index import KeyedIndex
from bottega.cache.predictor import MatchPredictor, PredictorSettings, train
from tests.support.waiting import wait_until

_KEY = "5e" * 32
# Of Nirvana, section 5.2.
TRAINED_ON = 10_000
_TRAININGS = 3
# From which a key has a model. For the first one the stream waits, as users' prompts come more slowly than these.
FIRST_ENTRIES = PredictorSettings().least_entries
_TRAIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Of all questions that the predictor had a word on; its searches were made all the same.

    outcomes: by (predicted hit, hit). on: the share of these questions at which it was believed.
    lookup_s: of a search, on average.
    """

    outcomes: Counter[tuple[bool, bool]]
    on: float
    lookup_s: float

    def share(self, of: tuple[bool, bool], among: tuple[bool, bool]) -> float:
        """Of two outcomes, the first's part; 0 where there was neither."""
        both = self.outcomes[of] + self.outcomes[among]
        return self.outcomes[of] / both if both else 0.0

    @property
    def precision(self) -> float:
        """Of the predicted hits, those that were hits."""
        return self.share((True, True), (True, False))

    @property
    def recall(self) -> float:
        """Of the hits, those that were predicted."""
        return self.share((True, True), (False, True))

    @property
    def specificity(self) -> float:
        """Of the misses, those that were predicted."""
        return self.share((False, False), (True, False))

    @property
    def hit_rate(self) -> float:
        """Of the questions, the hits."""
        hits = self.outcomes[True, True] + self.outcomes[False, True]
        return hits / max(self.outcomes.total(), 1)

    @property
    def break_even(self) -> float:
        """The seconds of a look-up, over those that a hit saves, from which believing the predictor pays."""
        lost = self.hit_rate * (1.0 - self.recall)
        spared = (1.0 - self.hit_rate) * self.specificity
        return lost / spared if spared else float("inf")


def predict(vectors: NDArray[np.float32], least: float, *, saved_s: float, lookup_s: float | None = None) -> Predicted:
    """Asks for every prompt, and keeps those that find nothing of this similarity.

    saved_s: seconds that a hit saves. lookup_s: of a search, as if the index were that slow; None: as it is.
    """
    index = KeyedIndex()
    predictor = MatchPredictor(index.sample)
    outcomes: Counter[tuple[bool, bool]] = Counter()
    spent_s, on = 0.0, 0
    try:
        for number, vector in enumerate(vectors):
            prediction = predictor.predict(_KEY, vector)
            began = time.perf_counter()
            matches = index.search(_KEY, vector, 1)
            took_s = time.perf_counter() - began
            spent_s += took_s
            hit = bool(matches) and matches[0].similarity >= least
            outcomes[prediction.hit, hit] += prediction.measured
            on += prediction.measured and predictor.statistics().on
            predictor.record(prediction, hit=hit, lookup_s=lookup_s or took_s, saved_s=saved_s if hit else None)
            if not hit:
                index.add(_KEY, number, vector)
                predictor.changed(_KEY, entries=index.entries(_KEY))
                if index.entries(_KEY) == FIRST_ENTRIES:
                    wait_until(lambda: predictor.statistics().models > 0, "the first model", within_s=_TRAIN_S)
        return Predicted(outcomes=outcomes, on=on / max(outcomes.total(), 1), lookup_s=spent_s / len(vectors))
    finally:
        predictor.close()
        index.close()


def retrain_s(vectors: NDArray[np.float32]) -> float:
    """The least seconds in which a model of TRAINED_ON records is trained; those of the stream, again where it is
    shorter."""
    records = np.resize(vectors, (TRAINED_ON, vectors.shape[1]))
    took_s = []
    for _ in range(_TRAININGS):
        began = time.perf_counter()
        train(records)
        took_s.append(time.perf_counter() - began)
    return min(took_s)
