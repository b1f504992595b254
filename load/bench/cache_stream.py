"""Streams of prompts for benches of the approximate cache: their embeddings, thresholds, and a replay to a real store.

No picture is drawn. The miniature's embeddings are not those of Nirvana's prompts, so its thresholds mean nothing here.
What is kept of the paper is how often which step is hit; the thresholds are the quantiles of the stream's own
similarities that give that.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bottega.addons.cache.placement import placement_key
from bottega.addons.cache.starts import prompt_digest, recorded_steps
from bottega.addons.interface.store_link import rank_stores
from bottega.cache.eviction import LCBFU, EvictionPolicy
from bottega.cache.latent import RecordedLatent, StoreAnswer
from bottega.cache.store.settings import LatentStatistics, StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.clocks import Clock
from bottega.transport import DType
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import (
    CacheEntry,
    CacheLengthClass,
    CacheProfile,
    CacheQuestion,
    CacheRecording,
    CacheThreshold,
)

Vectors = NDArray[np.float32]
"""Unit vectors [prompts, width]."""

STEPS = 50
NIRVANA_HITS: Mapping[float, float] = {0.1: 0.2849, 0.2: 0.2299, 0.3: 0.1855, 0.4: 0.1497, 0.5: 0.08}
"""Of all prompts, those that start after so much of the steps. Known of Nirvana (Table 3 and section 7.3) are that .93
start from a latent and save .23 of all steps, and .08 the largest part; the four others fall by one ratio, .807, which
these three fix."""

# An index may find a vector a little less similar to itself than 1.
_ROUNDING = 1e-5
_BISECTIONS = 14
_ROOM = 1024
_EMBED_ROWS = 256
# Of the miniature's latents.
_SHAPE = (4, 16, 16)
_LATENT_BYTES = 4 * 16 * 16 * 4
# Of an entry, which has at least one latent: next to nothing.
_PICTURE_BYTES = 3
_KEY, _MODEL = "5e" * 32, "5e" * 32
_WRITE_S = 60.0
# Between two prompts, by the store's clock: a picture of SDXL with 50 steps takes a GPU about so long.
_PROMPT_S = 1.0


def embed(texts: Sequence[str]) -> Vectors:
    """Return vectors of prompts by the miniature's second text encoder."""
    import torch

    from bottega.quality.clip import load_miniature

    clip = load_miniature()
    different = sorted(set(texts))
    parts = [clip.embed_texts(different[at : at + _EMBED_ROWS]) for at in range(0, len(different), _EMBED_ROWS)]
    vectors = torch.nn.functional.normalize(torch.cat(parts), dim=-1).numpy()
    places = {text: place for place, text in enumerate(different)}
    found: Vectors = vectors[[places[text] for text in texts]]
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Nearest:
    """A stream without a budget."""

    similarities: NDArray[np.float32]
    """Of each prompt to the most similar one that was recorded before it, -1 where there is none."""
    recorded: int
    """Prompts that were recorded, as nothing similar enough was there."""


def nearest_recorded(vectors: Vectors, least: float) -> Nearest:
    """Replay a stream; each prompt is recorded unless one of at least this similarity was."""
    kept, recorded = np.empty((_ROOM, vectors.shape[1]), np.float32), 0
    found = np.full(len(vectors), -1.0, np.float32)
    for number, vector in enumerate(vectors):
        if recorded:
            found[number] = (kept[:recorded] @ vector).max()
        if found[number] < least:
            if recorded == len(kept):
                kept = np.concatenate([kept, np.empty_like(kept)])
            kept[recorded] = vector
            recorded += 1
    return Nearest(similarities=found, recorded=recorded)


def thresholds(vectors: Vectors, hits: Mapping[float, float] = NIRVANA_HITS) -> dict[float, float]:
    """Return the least similarity by fraction of the steps, with which at least so many prompts are hit.

    There is no budget. What is recorded depends on the least similarity alone: it is found by bisection, and the others
    are quantiles of the similarities to what is then recorded.
    """
    low, high = -1.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        enough = np.mean(nearest_recorded(vectors, middle).similarities >= middle) >= sum(hits.values())
        low, high = (middle, high) if enough else (low, middle)
    ordered = np.sort(nearest_recorded(vectors, low).similarities)[::-1]
    found = {min(hits): low}
    for fraction in sorted(hits)[1:]:
        count = sum(share for other, share in hits.items() if other >= fraction) * len(vectors)
        found[fraction] = max(low, float(ordered[max(int(np.ceil(count)) - 1, 0)]) - _ROUNDING)
    return found


def profile(least: Mapping[float, float]) -> CacheProfile:
    """Return a profile with these thresholds by fraction, for prompts of any length."""
    named = [CacheThreshold(fraction=fraction, similarity=similarity) for fraction, similarity in sorted(least.items())]
    return CacheProfile(model_hash=_MODEL, balanced=[CacheLengthClass(thresholds=named)], about="of a bench's stream")


@dataclass(slots=True, kw_only=True)
class Replayed:
    """A stream that was replayed to a store."""

    prompts: int
    by_step: Counter[int] = field(default_factory=Counter)
    """Hits by the step that they start after."""
    statistics: LatentStatistics
    """The store's, at the end."""

    @property
    def hit_rate(self) -> float:
        """The share of the prompts that start from a latent."""
        return self.by_step.total() / self.prompts

    @property
    def saved(self) -> float:
        """The share of all steps that are not computed."""
        return sum(step * hits for step, hits in self.by_step.items()) / (STEPS * self.prompts)


class _BenchClock:
    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return self.passed_s


def replay(
    folder: Path,
    vectors: Vectors,
    measured: CacheProfile,
    *,
    policy: EvictionPolicy,
    latents: int,
    row_pictures: int = 6,
) -> Replayed:
    """Ask for every prompt and record where the store wants it.

    Args:
        folder: Of the store, which begins empty.
        latents: So many have room.
        row_pictures: As in the cache's configuration.
    """
    clock = _BenchClock()
    with _open_store(folder, measured, clock, policy=policy, latents=latents, row_pictures=row_pictures) as store:
        stream, by_step = _Stream(clock), Counter[int]()
        for number, vector in enumerate(vectors):
            by_step.update(stream.ask(store, number, vector))
        statistics = store.statistics()
    return Replayed(prompts=len(vectors), by_step=by_step, statistics=statistics)


@contextmanager
def _open_store(
    folder: Path,
    measured: CacheProfile,
    clock: _BenchClock,
    *,
    policy: EvictionPolicy,
    latents: int,
    row_pictures: int = 6,
) -> Iterator[LatentStore]:
    settings = StoreSettings(
        folder=folder,
        budget_bytes=latents * (_LATENT_BYTES + _PICTURE_BYTES),
        policy=policy,
        exploration=0.0,
        row_pictures=row_pictures,
        doorkeeper=False,
        predictor=False,
        seed=0,
    )
    store = LatentStore(settings, clock=Clock(monotonic=clock))
    store.start()
    try:
        store.set_profile(measured)
        yield store
        statistics = store.statistics()
    finally:
        store.close()
    if statistics.trouble or any(statistics.dropped.values()) or statistics.damaged:
        raise RuntimeError(f"the store could not keep all: {statistics}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReplay:
    """A stream that was replayed to several caches, of which one is lost and to which one is added."""

    hits: list[bool]
    """Whether each prompt starts from a latent."""
    saved: float
    """Share of all steps that are not computed."""
    moved: tuple[float, float]
    """Share of the prompts that belong to another cache than before, after the loss and after the addition."""
    misplaced: tuple[float, float]
    """Share of the entries that belong to another cache: right after the addition, and at the end."""

    def hit_rate(self, first: float, last: float) -> float:
        """Return the hit rate of a part of the stream, given by shares of its length."""
        part = self.hits[int(first * len(self.hits)) : int(last * len(self.hits))]
        return sum(part) / max(len(part), 1)


def replay_shared(
    folder: Path, vectors: Vectors, measured: CacheProfile, *, latents: int, names: Sequence[str], by_cell: bool = True
) -> SharedReplay:
    """Replay a stream to caches that share the entries of its only key.

    Args:
        folder: Of the stores, which begin empty.
        latents: So many have room in each cache.
        names: Of the caches. If there are four, the second is lost after a third of the stream, and the fourth is added
            after two thirds.
        by_cell: Whether the caches share the entries by key and cell, as workers do; otherwise by the key alone.
    """
    clock = _BenchClock()
    stream, there, steps = _Stream(clock), list(names[:3]), 0
    hits: list[bool] = []
    moved, misplaced = [0.0], [0.0]
    third = len(vectors) // 3
    changes = {third: [names[0], names[2]], 2 * third: [names[0], *names[2:]]} if len(names) == 4 else {}

    def owner(vector: Vectors) -> str:
        return rank_stores(there, placement_key(_KEY, vector) if by_cell else _KEY)[0]

    with ExitStack() as opened:
        stores = {
            name: opened.enter_context(_open_store(folder / name, measured, clock, policy=LCBFU, latents=latents))
            for name in names
        }

        def misplaced_share() -> float:
            placed = [(name, entry.parameters.seed) for name in there for entry in _entries(stores[name])]
            return sum(owner(vectors[number]) != name for name, number in placed) / max(len(placed), 1)

        for number, vector in enumerate(vectors):
            if number in changes:
                before = [owner(other) for other in vectors]
                there = changes[number]
                moves = [owner(other) != old for other, old in zip(vectors, before, strict=True)]
                moved.append(sum(moves) / len(moves))
                misplaced.append(misplaced_share())
            found = stream.ask(stores[owner(vector)], number, vector)
            hits.append(bool(found))
            steps += sum(found)
        misplaced.append(misplaced_share())
    return SharedReplay(
        hits=hits,
        saved=steps / (STEPS * len(vectors)),
        moved=(moved[-2] if changes else 0.0, moved[-1]),
        misplaced=(misplaced[-2], misplaced[-1]),
    )


def _entries(store: LatentStore) -> Sequence[CacheEntry]:
    return store.entries(_MODEL, 1_000_000)


class _Stream:
    """Asks stores for prompts one after the other, and records where a store wants it."""

    def __init__(self, clock: _BenchClock) -> None:
        self._clock = clock
        self._recorded: set[bytes] = set()
        self._question = CacheQuestion(
            key=_KEY, model_hash=_MODEL, steps=STEPS, images=1, fidelity=generation_pb2.FIDELITY_BALANCED, words=1
        )
        self._header = CacheRecording(key=_KEY, model_hash=_MODEL, steps=recorded_steps(STEPS))

    def ask(self, store: LatentStore, number: int, vector: Vectors) -> list[int]:
        """Return the steps that the prompt saves, for each latent that it starts from."""
        self._clock.passed_s += _PROMPT_S
        prompt = hashlib.sha256(vector.tobytes()).hexdigest()  # of equal prompts the same
        self._question.prompt_digest, self._question.seed = prompt_digest(prompt), number
        answer = store.ask(self._question, vector)
        _check(answer, self._recorded)
        if answer.header.record:
            made = [_latent(number, step) for step in self._header.steps]
            self._recorded.update(_digest(latent) for latent in made)
            self._header.parameters.CopyFrom(generation_pb2.GenerationSpec(prompt=prompt, seed=number))
            store.record(self._header, embedding=vector, picture=np.zeros((1, 1, 3), np.uint8), latents=made)
            if not store.flush(_WRITE_S):
                raise RuntimeError(f"the store wrote nothing for {_WRITE_S:g} s")
        return [start.step for start in answer.header.hits]


def _latent(number: int, step: int) -> RecordedLatent:
    """Return a latent that no other prompt or step has."""
    values = np.full(_SHAPE, number, np.float32)
    values[0, 0, 0] = step
    return RecordedLatent(dtype=DType.FLOAT32, shape=_SHAPE, data=values.tobytes())


def _check(answer: StoreAnswer, recorded: set[bytes]) -> None:
    """Raise where a latent was not recorded, or is of another step."""
    for start, latent in zip(answer.header.hits, answer.latents, strict=True):
        step = int(np.frombuffer(latent.data, np.float32)[0])
        if step != start.step or _digest(latent) not in recorded:
            raise RuntimeError(f"{start.entry}@{start.step} is not what was recorded")


def _digest(latent: RecordedLatent) -> bytes:
    return hashlib.sha256(latent.data).digest()
