"""What stages of the training learn from here: a few pictures and their latents, by one thread."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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


@pytest.fixture
def told() -> dict[str, Any]:
    """What a UNet is called with, for two rows."""
    generator = torch.Generator().manual_seed(0)
    noisy, context, pooled = (
        torch.randn(shape, generator=generator) for shape in ((2, 4, 16, 16), (2, 24, 128), (2, 64))
    )
    return {
        "sample": noisy,
        "timestep": torch.tensor([5, 700]),
        "encoder_hidden_states": context,
        "added_cond_kwargs": {"text_embeds": pooled, "time_ids": torch.full((2, 6), 64.0)},
    }
