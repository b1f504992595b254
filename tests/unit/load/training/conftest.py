"""What stages of the training learn from here: a few pictures and their latents, by one thread."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from load.miniature.training.corpus import Corpus, draw_corpus
from load.miniature.training.stages import STEPS
from load.miniature.training.train import Training
from tests.support.torch_threads import torch_threads


def every_stage(quick: Collection[str]) -> list[object]:
    """Of which the others, which learn alike, are slow."""
    return [pytest.param(name, marks=[] if name in quick else [pytest.mark.slow]) for name in STEPS]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Batches here are too small for more, and sums are added in the same order each time."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return draw_corpus(32, seed=1)


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(folder=tmp_path / "training", steps=1, rows=2, pictures=4)
