"""A one-class support vector machine: from vectors that are there, whether another one is of their kind.

The machine is trained by stochastic gradient descent, which is linear, on a Nystroem approximation of a Gaussian
kernel; what is kept are plain arrays, and nothing of scikit-learn's. Source: Nirvana (NSDI'24), section 5.2, where nu
is .001.

With so small a nu, descent ends long before the machine's own offset has moved from where it lets everything in; its
direction does sort vectors. So the offset is that which so many of some vectors lie above that were not trained on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.vector_index import Vectors

NU = 0.001
RECALL = 0.95
"""Of vectors of the same kind, as the paper reports it."""

_LANDMARKS = 100
_HELD_OUT = 0.1
# Measured on vectors in clusters: more steps and other rates sort vectors no better; a tenth of the steps is too few.
_STEPS = 50_000
_MOST_PASSES = 200
_RATE = 0.1
_LEAST_EIGENVALUE = 1e-3
# Of vectors that are all alike.
_LEAST_SCALE = 1e-6
# Of deviations whose mean square is 1; wider ones do not tell clusters apart, and narrower ones do not tell those
# without a landmark.
_GAMMA = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneClassModel:
    """centre: [width], of the vectors; embeddings have a large part in common, which would hide what they differ in.

    scale: of their deviations from it, the root mean square. landmarks: [n, width], scaled deviations to which others
    are compared. weights: [n], of these comparisons. gamma: of the kernel, exp(-gamma |x - y|^2). offset: the least
    score of the class.
    """

    centre: Vectors
    scale: float
    landmarks: Vectors
    weights: NDArray[np.float32]
    gamma: float
    offset: float

    @property
    def width(self) -> int:
        """Of its vectors."""
        return int(self.landmarks.shape[1])

    def scores(self, vectors: Vectors) -> NDArray[np.float32]:
        """[m], of unit vectors [m, width]: the larger, the more of the kind."""
        return _kernel((vectors - self.centre) / self.scale, self.landmarks, self.gamma) @ self.weights

    def contains(self, vector: Vectors) -> bool:
        """Whether a unit vector is of the kind."""
        return bool(self.scores(vector[None])[0] >= self.offset)


def train(vectors: Vectors, *, seed: int = 0) -> OneClassModel:
    """The kind of unit vectors [n, width], n at least 100; takes about .1 s for 10,000 of them."""
    # A service with few entries never imports it, which takes a second.
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
    """[n, rank]: what makes inner products of comparisons with landmarks approximate the kernel.

    scikit-learn's Nystroem also keeps what is a millionth of the kernel, which is nothing but noise where landmarks are
    close to each other.
    """
    values, vectors = np.linalg.eigh(kernel)
    kept = values > _LEAST_EIGENVALUE * values[-1]
    made: NDArray[np.float32] = vectors[:, kept] / np.sqrt(values[kept])
    return made


def _kernel(vectors: Vectors, landmarks: Vectors, gamma: float) -> NDArray[np.float32]:
    """[n, landmarks], float32."""
    distances: NDArray[np.float32] = vectors @ landmarks.T
    distances *= -2.0
    distances += (vectors**2).sum(axis=1)[:, None]
    distances += (landmarks**2).sum(axis=1)
    distances *= -gamma
    return np.exp(distances, out=distances)
