"""The one-class machine: what it takes for of its kind, and that plain arrays say what scikit-learn's objects do."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from bottega.cache.index.vector_index import unit_vectors
from bottega.cache.predictor import OneClassModel, train

WIDTH = 64


def _clusters(count: int, *, seed: int, clusters: int = 5, kind: int = 0) -> NDArray[np.float32]:
    """Unit vectors around some directions, and all of them around one more, as embeddings of texts are."""
    centres = np.random.default_rng(1000 + kind).standard_normal((clusters, WIDTH))
    common = np.random.default_rng(7).standard_normal(WIDTH)
    rng = np.random.default_rng(seed)
    noise = 0.4 * rng.standard_normal((count, WIDTH))
    return unit_vectors(centres[rng.integers(clusters, size=count)] + common + noise)


@pytest.fixture(scope="module")
def model() -> OneClassModel:
    return train(_clusters(3000, seed=0))


def test_nearly_all_of_the_same_kind_are_known(model: OneClassModel) -> None:
    known = [model.contains(vector) for vector in _clusters(400, seed=1)]
    assert 0.9 < np.mean(known) < 0.99


def test_most_of_another_kind_are_not(model: OneClassModel) -> None:
    others = _clusters(400, seed=1, clusters=40, kind=1)
    assert np.mean([model.contains(vector) for vector in others]) < 0.3


def test_scores_are_those_of_the_machine_that_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with every vector for a landmark, those are of the kernel itself."""
    from sklearn.linear_model import SGDOneClassSVM
    from sklearn.metrics.pairwise import rbf_kernel

    trained = []
    fit = SGDOneClassSVM.fit

    def seen(self: SGDOneClassSVM, features: NDArray[np.float32]) -> SGDOneClassSVM:
        trained.append((self, features))
        return fit(self, features)

    monkeypatch.setattr(SGDOneClassSVM, "fit", seen)
    vectors = _clusters(100, seed=2)
    model = train(vectors)
    machine, features = trained[0]
    assert machine.nu == 0.001
    shuffled = np.random.default_rng(0).permutation(vectors)[10:]
    np.testing.assert_allclose(model.scores(shuffled), machine.score_samples(features), atol=1e-3)
    deviations = (shuffled - model.centre) / model.scale
    np.testing.assert_allclose(features @ features.T, rbf_kernel(deviations, gamma=model.gamma), atol=0.02)


def test_what_is_far_from_all_is_not_of_the_kind_whatever_its_direction() -> None:
    rng = np.random.default_rng(0)
    centre = rng.standard_normal(16)
    model = train(unit_vectors(centre + 0.1 * rng.standard_normal((600, 16))))
    far = unit_vectors(-centre + 0.5 * rng.standard_normal((200, 16)))
    assert not any(model.contains(vector) for vector in far)
