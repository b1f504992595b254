"""Prompts asked one after the other of a real store of cached latents, as a worker asks: no picture is drawn."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bottega.addons.cache.planning.eviction import EvictionPolicy
from bottega.addons.cache.wire import prompt_digest, recorded_steps
from bottega.cache.latent import RecordedLatent, StoreAnswer
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.statistics import LatentStatistics
from bottega.cache.store.store import LatentStore
from bottega.clocks import Clock
from bottega.transport import DType
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile, CacheQuestion, CacheRecording, CacheThreshold

STEPS = 50
# Of the miniature.
SHAPE = (4, 16, 16)
LATENT_BYTES = 4 * 16 * 16 * 4
# Of an entry, which has at least one latent: next to nothing.
PICTURE_BYTES = 3
_KEY, _MODEL = "5e" * 32, "5e" * 32
_WRITE_S = 60.0
# Between two prompts, by the store's clock: a picture of SDXL with 50 steps takes a GPU about so long.
PROMPT_S = 1.0


class _Seconds:
    """A clock that the bench turns."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return self.passed_s


@dataclass(slots=True, kw_only=True)
class Replayed:
    """What came of a stream. by_step: hits, by the step that they start after. statistics: the store's, at the end."""

    prompts: int
    by_step: Counter[int] = field(default_factory=Counter)
    statistics: LatentStatistics

    @property
    def hit_rate(self) -> float:
        """Of the prompts, those that start from a latent."""
        return self.by_step.total() / self.prompts

    @property
    def saved(self) -> float:
        """Of all steps, those that are not computed."""
        return sum(step * hits for step, hits in self.by_step.items()) / (STEPS * self.prompts)


def profile(thresholds: Mapping[float, float]) -> CacheProfile:
    """By fraction, for prompts of any length."""
    named = [CacheThreshold(fraction=fraction, similarity=least) for fraction, least in sorted(thresholds.items())]
    return CacheProfile(model_hash=_MODEL, balanced=[CacheLengthClass(thresholds=named)], about="of a bench's stream")


def replay(
    folder: Path,
    vectors: NDArray[np.float32],
    measured: CacheProfile,
    *,
    policy: EvictionPolicy,
    latents: int,
    row_pictures: int = 6,
) -> Replayed:
    """Asks for every prompt and records where the store wants it, with a cold store that has room for so many latents.

    folder: of the store; there is none yet. vectors: of the prompts, in their order. row_pictures: as in the cache's
    configuration.
    """
    settings = StoreSettings(
        folder=folder,
        budget_bytes=latents * (LATENT_BYTES + PICTURE_BYTES),
        policy=policy,
        exploration=0.0,
        row_pictures=row_pictures,
        doorkeeper=False,
        predictor=False,
        seed=0,
    )
    seconds = _Seconds()
    store = LatentStore(settings, clock=Clock(monotonic=seconds))
    store.start()
    try:
        store.set_profile(measured)
        by_step = _ask_all(store, vectors, seconds)
        statistics = store.statistics()
    finally:
        store.close()
    if statistics.trouble or any(statistics.dropped.values()) or statistics.damaged:
        raise RuntimeError(f"the store could not keep all: {statistics}")
    return Replayed(prompts=len(vectors), by_step=by_step, statistics=statistics)


def _ask_all(store: LatentStore, vectors: NDArray[np.float32], seconds: _Seconds) -> Counter[int]:
    by_step: Counter[int] = Counter()
    steps = recorded_steps(STEPS)
    recorded: set[bytes] = set()
    question = CacheQuestion(
        key=_KEY,
        model_hash=_MODEL,
        steps=STEPS,
        images=1,
        fidelity=generation_pb2.FIDELITY_BALANCED,
        words=1,
    )
    header = CacheRecording(key=_KEY, model_hash=_MODEL, steps=steps)
    picture = np.zeros((1, 1, 3), np.uint8)
    for number, vector in enumerate(vectors):
        seconds.passed_s += PROMPT_S
        prompt = hashlib.sha256(vector.tobytes()).hexdigest()  # of equal prompts the same
        question.prompt_digest, question.seed = prompt_digest(prompt), number
        answer = store.ask(question, vector)
        for start in answer.header.hits:
            by_step[start.step] += 1
        _check(answer, recorded)
        if answer.header.record:
            made = [_latent(number, step) for step in steps]
            recorded.update(_digest(latent) for latent in made)
            header.parameters.CopyFrom(generation_pb2.GenerationSpec(prompt=prompt, seed=number))
            store.record(header, embedding=vector, picture=picture, latents=made)
            if not store.flush(_WRITE_S):
                raise RuntimeError(f"the store wrote nothing for {_WRITE_S:g} s")
    return by_step


def _latent(number: int, step: int) -> RecordedLatent:
    """Of the prompt of that number; another one for each."""
    values = np.full(SHAPE, number, np.float32)
    values[0, 0, 0] = step
    return RecordedLatent(dtype=DType.FLOAT32, shape=SHAPE, data=values.tobytes())


def _check(answer: StoreAnswer, recorded: set[bytes]) -> None:
    """Raises where a latent is none that was recorded, or one of another step."""
    for start, latent in zip(answer.header.hits, answer.latents, strict=True):
        step = int(np.frombuffer(latent.data, np.float32)[0])
        if step != start.step or _digest(latent) not in recorded:
            raise RuntimeError(f"{start.entry}@{start.step} is not what was recorded")


def _digest(latent: RecordedLatent) -> bytes:
    return hashlib.sha256(latent.data).digest()
