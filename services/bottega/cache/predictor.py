"""Predicts whether a search will find anything, so that searches without a result can be skipped to save time.

Each key with enough entries has a model of its entries' embeddings, which is trained in the background, again whenever
a share of the entries has changed. `bottega.addons.cache.skip_profile` decides from measurements whether
predictions are used. Source: Nirvana (NSDI'24), section 5.2, where nu is .001.

The model is a one-class support vector machine. It is trained by stochastic gradient descent, in linear time, on a
Nystroem approximation of a Gaussian kernel. Only plain arrays are kept, no scikit-learn objects. With such a small nu,
descent ends long before the machine's own offset has moved from where it accepts everything, but its direction does
rank vectors. So the offset is chosen such that the share RECALL of held-out vectors is accepted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bottega.addons.cache.skip_profile import PredictorRates, PredictorSwitch
from bottega.cache.index.vector_index import Vectors, unit_vectors
from bottega.storage import SerialThread

# Niceness of the training thread: threads that answer requests go first. Not higher, because it must make progress on
# a busy machine while it holds a lock.
_NICENESS = 5
NU = 0.001
RECALL = 0.95
"""Share of held-out vectors of a key that its model must accept, as in the paper."""

_LANDMARKS = 100
_HELD_OUT = 0.1
# Measured on clustered vectors: more steps and other rates rank vectors no better; a tenth of the steps is too few.
_STEPS = 50_000
_MOST_PASSES = 200
_RATE = 0.1
_LEAST_EIGENVALUE = 1e-3
# Scale if all vectors are equal.
_LEAST_SCALE = 1e-6
# Gamma of the kernel, for deviations with a mean square of 1. A wider kernel does not separate clusters, a narrower one
# does not separate those without a landmark.
_GAMMA = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorSettings:
    """Settings of a MatchPredictor."""

    least_entries: int = 500
    """Number of entries from which on a key has a model."""
    changed_share: float = 0.05
    """Share of a key's entries that has to change before its model is trained again (5 % in the paper)."""
    most_records: int = 10_000
    """Upper bound on the number of embeddings with which a model is trained."""
    most_models: int = 64
    """Upper bound on the number of models. The first keys get them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPrediction:
    """The prediction for one search."""

    hit: bool
    """Whether the search is expected to find something."""
    weight: float
    """0 to skip the search, else the number of searches for which it counts in the statistics."""
    measured: bool
    """Whether a model made the prediction, so that the outcome of the search should be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorStatistics:
    """Statistics of a predictor. All fields but `on`, `rates` and `training_s` are counts."""

    on: bool
    """Whether searches that are predicted to find nothing are skipped."""
    rates: PredictorRates
    models: int
    trainings: int
    training_s: float
    """Seconds that the last training took."""
    predicted_hits: int
    predicted_misses: int
    skipped: int
    """Number of searches that were skipped."""


@dataclass(slots=True, kw_only=True)
class _Key:
    """The training state of a key's model."""

    entries: int = 0
    """Number of entries of the key at the last training."""
    changes: int = 0
    """Number of entries that were added or removed since then."""
    training: bool = False
    model: OneClassModel | None = None


class MatchPredictor:
    """Predicts before a search whether it will find nothing, with a model for each key. Close it at the end.

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
        """Record that `changes` entries of a key were added or removed, so that it now has `entries`.

        If its model is due for training, it is trained in the background.
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
        """Predict whether a search of a key will find something, and whether to do it. Call this before each search.

        Raises ValueError for vectors for which a search raises it.
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
        """Record the result of a search that was predicted.

        Args:
            lookup_s: Seconds that the search took.
            saved_s: Seconds that its hit saves; None if unknown.
        """
        if prediction.measured and prediction.weight > 0.0:
            with self._lock:
                self._switch.record(
                    prediction.weight, predicted_hit=prediction.hit, hit=hit, lookup_s=lookup_s, saved_s=saved_s
                )

    def statistics(self) -> PredictorStatistics:
        """Return the current statistics."""
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
        """Wait for a running training, then stop. May be called again."""
        self._trainer.end(drop_waiting=True)

    def _train(self, key: str, known: _Key) -> None:
        """Train the model of a key, unless the key has too few entries by now."""
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneClassModel:
    """A trained model that says whether a vector resembles the vectors of one key."""

    centre: Vectors
    """[width], the mean of the vectors. Embeddings have a large common part that would hide their differences."""
    scale: float
    """Root mean square of the deviations of vectors from `centre`."""
    landmarks: Vectors
    """[n, width], scaled deviations to which the model compares vectors."""
    weights: NDArray[np.float32]
    """[n], weights of these comparisons."""
    gamma: float
    """Parameter of the kernel, exp(-gamma |x - y|^2)."""
    offset: float
    """Lowest score at which a vector is accepted."""

    @property
    def width(self) -> int:
        """Number of dimensions of its vectors."""
        return int(self.landmarks.shape[1])

    def scores(self, vectors: Vectors) -> NDArray[np.float32]:
        """Return the scores [m] of unit vectors [m, width]. A larger score means a closer resemblance."""
        return _kernel((vectors - self.centre) / self.scale, self.landmarks, self.gamma) @ self.weights

    def contains(self, vector: Vectors) -> bool:
        """Return whether the model accepts a unit vector."""
        return bool(self.scores(vector[None])[0] >= self.offset)


def train(vectors: Vectors, *, seed: int = 0) -> OneClassModel:
    """Train a model with unit vectors [n, width], n at least 100. This takes about .1 s for 10,000 of them."""
    # Imported here, because it takes a second and a service with few entries never needs it.
    from sklearn.linear_model import SGDOneClassSVM

    shuffled = np.random.default_rng(seed).permutation(vectors)
    held_out, rest = np.split(shuffled, [int(_HELD_OUT * len(shuffled))])
    centre = rest.mean(axis=0)
    deviations = rest - centre
    scale = max(float(np.sqrt((deviations**2).sum(axis=1).mean())), _LEAST_SCALE)
    deviations /= scale
    landmarks = deviations[:_LANDMARKS]
    normalization = _inverse_root(_kernel(landmarks, landmarks, _GAMMA))
    features = _kernel(deviations, landmarks, _GAMMA) @ normalization
    passes = min(max(_STEPS // len(rest), 1), _MOST_PASSES)
    machine = SGDOneClassSVM(
        nu=NU, max_iter=passes, tol=None, learning_rate="constant", eta0=_RATE, shuffle=False, random_state=seed
    ).fit(features)
    weights = (normalization @ machine.coef_.ravel()).astype(np.float32)
    model = OneClassModel(centre=centre, scale=scale, landmarks=landmarks, weights=weights, gamma=_GAMMA, offset=0.0)
    return replace(model, offset=float(np.quantile(model.scores(held_out), 1.0 - RECALL)))


def _inverse_root(kernel: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a matrix [n, rank] with which inner products of landmark comparisons approximate the kernel.

    scikit-learn's Nystroem also keeps a millionth of the kernel, which is only noise if landmarks are near each other.
    """
    values, vectors = np.linalg.eigh(kernel)
    kept = values > _LEAST_EIGENVALUE * values[-1]
    made: NDArray[np.float32] = vectors[:, kept] / np.sqrt(values[kept])
    return made


def _kernel(vectors: Vectors, landmarks: Vectors, gamma: float) -> NDArray[np.float32]:
    """Return the kernel values of vectors and landmarks, [n, landmarks], float32."""
    distances: NDArray[np.float32] = vectors @ landmarks.T
    distances *= -2.0
    distances += (vectors**2).sum(axis=1)[:, None]
    distances += (landmarks**2).sum(axis=1)
    distances *= -gamma
    return np.exp(distances, out=distances)
