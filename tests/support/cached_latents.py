"""A store of cached latents with small ones in it: real files, real records, vectors of a known similarity."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.latent import RecordedLatent, StoreAnswer
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.transport import DType
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import (
    CacheLengthClass,
    CacheProfile,
    CacheQuestion,
    CacheRecording,
    CacheStart,
    CacheThreshold,
)

Vector = npt.NDArray[np.float32]

KEY = "ab" * 32
MODEL = "cd" * 32
STEPS = 50
RECORDED = (5, 10, 15, 20, 25)
THRESHOLDS = {0.1: 0.65, 0.2: 0.75, 0.3: 0.85, 0.4: 0.9, 0.5: 0.95}
SHAPE = (4, 8, 8)
LATENT_BYTES = 4 * 8 * 8 * 4
PICTURE_BYTES = 6 * 5 * 3
WIDTH = 64
WAIT_S = 60.0


def vector(seed: int) -> Vector:
    """Of length 1; two of different seeds are far from similar."""
    made = np.random.default_rng(seed).standard_normal(WIDTH)
    return np.asarray(made / np.linalg.norm(made), np.float32)


def similar(to: Vector, similarity: float, seed: int = 1) -> Vector:
    """A vector that has this cosine with another one."""
    to = to / np.linalg.norm(to)
    other = np.random.default_rng([seed, 1]).standard_normal(to.size)
    other -= (other @ to) * to
    made = similarity * to + np.sqrt(1.0 - similarity**2) * other / np.linalg.norm(other)
    return np.asarray(made, np.float32)


def latent(seed: int, step: int, shape: tuple[int, ...] = SHAPE) -> RecordedLatent:
    """Its bytes say which it is."""
    data = np.random.default_rng([seed, step]).standard_normal(shape).astype(np.float32)
    return RecordedLatent(dtype=DType.FLOAT32, shape=shape, data=data.tobytes())


def digest(answer: StoreAnswer) -> list[str]:
    return [hashlib.sha256(each.data).hexdigest() for each in answer.latents]


def profile(model: str = MODEL, words: int = 15) -> CacheProfile:
    """Nirvana's thresholds for prompts of at most so many words; longer ones need more."""
    return CacheProfile(
        model_hash=model,
        balanced=[
            CacheLengthClass(max_words=words, thresholds=_thresholds(0.0)),
            CacheLengthClass(max_words=0, thresholds=_thresholds(0.04)),
        ],
        fast=[CacheLengthClass(max_words=0, thresholds=_thresholds(-0.1))],
        about="as in the paper",
    )


def _thresholds(more: float) -> list[CacheThreshold]:
    return [CacheThreshold(fraction=share, similarity=least + more) for share, least in THRESHOLDS.items()]


def question(key: str = KEY, **fields: Any) -> CacheQuestion:
    """Of one picture, under FIDELITY_BALANCED."""
    given = {"images": 1, "fidelity": generation_pb2.FIDELITY_BALANCED, "words": 5, "steps": STEPS}
    return CacheQuestion(key=key, model_hash=MODEL, **{**given, **fields})


def pins(*places: tuple[str, int], key: str = KEY) -> CacheQuestion:
    return question(key, pinned=[CacheStart(entry=entry, step=step) for entry, step in places])


def record(
    store: LatentStore,
    embedding: Vector,
    *,
    key: str = KEY,
    model: str = MODEL,
    seed: int = 0,
    steps: Sequence[int] = RECORDED,
    prompt: str = "",
) -> None:
    """Hands in a picture's latents; its prompt is its seed's name where none is given."""
    store.record(
        CacheRecording(
            key=key,
            model_hash=model,
            parameters=generation_pb2.GenerationSpec(prompt=prompt or f"prompt {seed}", seed=seed),
            steps=steps,
        ),
        embedding=embedding,
        picture=np.full((6, 5, 3), seed % 256, np.uint8),
        latents=[latent(seed, step) for step in steps],
    )


def room(latents: int, entries: int) -> int:
    """Bytes of so many latents, and of the pictures of so many entries."""
    return latents * LATENT_BYTES + entries * PICTURE_BYTES


def settings(folder: Path, **changed: Any) -> StoreSettings:
    """Of a store that explores nothing, without doorkeeper and predictor, with room for 1,000 latents."""
    given = {
        "budget_bytes": room(1000, 1000),
        "exploration": 0.0,
        "doorkeeper": False,
        "predictor": False,
        "retry_s": 0.05,
    }
    return StoreSettings(folder=folder, **{**given, **changed})


@contextlib.contextmanager
def running(
    folder: Path, *, measured: bool = True, index: KeyedIndex | None = None, **changed: Any
) -> Iterator[LatentStore]:
    """A store that has read what is there. measured: its model has a profile."""
    store = LatentStore(settings(folder, **changed), index=index)
    store.start()
    try:
        store.flush(WAIT_S)
        if measured and not store.profiles():
            store.set_profile(profile())
        yield store
    finally:
        store.close()


def written(store: LatentStore) -> None:
    assert store.flush(WAIT_S), store.statistics().trouble
