"""A one-class support vector machine: learnt from a set of vectors, it tells whether another one is of their kind.

It is trained by stochastic gradient descent, in linear time, on a Nystroem approximation of a Gaussian kernel. Only
plain arrays are kept, no scikit-learn objects. Source: Nirvana (NSDI'24), section 5.2, where nu is .001.

With such a small nu, descent ends long before the machine's own offset has moved from where it accepts everything, but
its direction does rank vectors. So the offset is chosen such that the share RECALL of held-out vectors is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.vector_index import Vectors

NU = 0.001
RECALL = 0.95
"""Share of vectors of the same kind that are accepted, as the paper reports it."""

_LANDMARKS = 100
_HELD_OUT = 0.1
# Measured on clustered vectors: more steps and other rates rank vectors no better; a tenth of the steps is too few.
_STEPS = 50_000
_MOST_PASSES = 200
_RATE = 0.1
_LEAST_EIGENVALUE = 1e-3
# Scale of vectors that are all alike.
_LEAST_SCALE = 1e-6
# For deviations with a mean square of 1. A wider kernel does not separate clusters, a narrower one does not separate
# those without a landmark.
_GAMMA = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneClassModel:
    """A trained model of a kind of vectors."""

    centre: Vectors
    """[width], the mean of the vectors. Embeddings have a large common part that would hide their differences."""
    scale: float
    """Root mean square of the deviations from the centre."""
    landmarks: Vectors
    """[n, width], scaled deviations to which others are compared."""
    weights: NDArray[np.float32]
    """[n], weights of these comparisons."""
    gamma: float
    """Parameter of the kernel, exp(-gamma |x - y|^2)."""
    offset: float
    """Least score of the kind."""

    @property
    def width(self) -> int:
        """Width of its vectors."""
        return int(self.landmarks.shape[1])

    def scores(self, vectors: Vectors) -> NDArray[np.float32]:
        """Return the scores [m] of unit vectors [m, width]; a larger score means more like the kind."""
        return _kernel((vectors - self.centre) / self.scale, self.landmarks, self.gamma) @ self.weights

    def contains(self, vector: Vectors) -> bool:
        """Return whether a unit vector is of the kind."""
        return bool(self.scores(vector[None])[0] >= self.offset)


def train(vectors: Vectors, *, seed: int = 0) -> OneClassModel:
    """Return a model of unit vectors [n, width], n at least 100. It takes about .1 s for 10,000 of them."""
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
    """Return [n, rank], with which inner products of landmark comparisons approximate the kernel.

    scikit-learn's Nystroem also keeps a millionth of the kernel, which is only noise if landmarks are near each other.
    """
    values, vectors = np.linalg.eigh(kernel)
    kept = values > _LEAST_EIGENVALUE * values[-1]
    made: NDArray[np.float32] = vectors[:, kept] / np.sqrt(values[kept])
    return made


def _kernel(vectors: Vectors, landmarks: Vectors, gamma: float) -> NDArray[np.float32]:
    """Return the kernel of vectors and landmarks, [n, landmarks], float32."""
    distances: NDArray[np.float32] = vectors @ landmarks.T
    distances *= -2.0
    distances += (vectors**2).sum(axis=1)[:, None]
    distances += (landmarks**2).sum(axis=1)
    distances *= -gamma
    return np.exp(distances, out=distances)
