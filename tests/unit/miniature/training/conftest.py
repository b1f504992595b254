"""What stages of the training learn from here: a few pictures and their latents, by one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bottega.miniature import WEIGHTS
from load.miniature.training.corpus import Corpus, Latents, draw_corpus, encode
from load.miniature.training.parts import load_parts
from tests.support.torch_threads import torch_threads


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Batches here are too small for more, and sums are added in the same order each time."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return draw_corpus(32, seed=1)


@pytest.fixture(scope="module")
def latents(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Latents:
    return encode(corpus, load_parts(WEIGHTS), tmp_path_factory.mktemp("latents"))


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
