"""What a job's pictures may start from: the index is searched, the selector decides, and the latents are read.

Every latent that goes out has the question's own key, and its checksum. Any thread asks, and waits for the disk
no longer than reading its latents takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from bottega.cache.contents import Contents
from bottega.cache.entry_table import Removal
from bottega.cache.latent import RecordedLatent, StoreAnswer
from bottega.cache.latent_files import LatentFiles, latent_name
from bottega.cache.profiles import ProfileFolder
from bottega.cache.recording import Vector
from bottega.cache.selector import Exploration, Selection, Selector
from bottega.cache.statistics import Counts
from bottega.errors import StorageUnavailable
from bottega.planning.skip_profile import SkipProfile
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2 import CacheAnswer, CacheOutcome, CacheQuestion, CacheStart

# That are looked at for each picture: some have lost the latents that would do, or have only late ones.
_MATCHES_PER_PICTURE = 4
_LEAST_MATCHES = 8

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Served:
    """Latents that were read so far. failed: of the disk, places that it did not give."""

    starts: list[CacheStart] = field(default_factory=list)
    latents: list[RecordedLatent] = field(default_factory=list)
    failed: set[tuple[int, int]] = field(default_factory=set)
    holes: int = 0

    @property
    def steps(self) -> int:
        """That are skipped."""
        return sum(start.step for start in self.starts)

    def answer(self, outcome: CacheOutcome.ValueType) -> StoreAnswer:
        """It, as the worker is told."""
        return StoreAnswer(header=CacheAnswer(hits=self.starts, outcome=outcome), latents=tuple(self.latents))


class Lookup:
    """lost: is told what has gone as it was damaged. has_read: whether all entries of earlier times are known."""

    def __init__(
        self,
        *,
        contents: Contents,
        files: LatentFiles,
        profiles: ProfileFolder,
        selector: Selector,
        exploration: Exploration,
        counts: Counts,
        lost: Callable[[Removal], None],
        has_read: Callable[[], bool],
    ) -> None:
        self._table = contents.table
        self._index = contents.index
        self._predictor = contents.predictor
        self._files = files
        self._profiles = profiles
        self._selector = selector
        self._exploration = exploration
        self._counts = counts
        self._lost = lost
        self._has_read = has_read

    def similar(self, question: CacheQuestion, embedding: Vector) -> StoreAnswer:
        """Latents of similar prompts, each of another entry; at most one for each picture."""
        fidelity, width = question.fidelity, embedding.size
        profile = self._profiles.skip_profile(question.model_hash, fidelity, width=width)
        if profile is None:
            return _Served().answer(cache_pb2.CACHE_OUTCOME_NO_PROFILE)
        prediction = self._predictor.predict(question.key, embedding) if self._predictor else None
        if prediction is not None and not prediction.weight:
            return _Served().answer(cache_pb2.CACHE_OUTCOME_PREDICTED_MISS)
        began = time.perf_counter()
        matches = self._matches(question, embedding)
        found = self._select(question, matches, profile)
        if self._predictor is not None and prediction is not None:
            lookup_s = time.perf_counter() - began
            saved_s = _saved_s(question, found)
            self._predictor.record(prediction, hit=bool(found), lookup_s=lookup_s, saved_s=saved_s)
        return self._serve(question, matches, profile, found)

    def pinned(self, question: CacheQuestion, embedding: Vector) -> StoreAnswer:
        """The latents that are asked for, whatever their similarity; those that are gone are left out.

        As long as entries are still being read, nothing is known to be gone: UNAVAILABLE.
        """
        known = self._has_read()
        served, wanted = _Served(), [start for start in question.pinned if start.entry]
        for start in wanted:
            entry = self._table.named(start.entry)
            if entry is None or entry.key != question.key:
                continue
            similarity = self._index.similarity(entry.key, entry.number, embedding)
            if similarity is not None:
                self._read(entry.number, start.step, similarity, served)
        if len(served.starts) == len(wanted):
            return served.answer(cache_pb2.CACHE_OUTCOME_HIT)
        return served.answer(_miss(served) if known else cache_pb2.CACHE_OUTCOME_UNAVAILABLE)

    def _matches(self, question: CacheQuestion, embedding: Vector) -> list[tuple[int, float]]:
        count = max(_LEAST_MATCHES, _MATCHES_PER_PICTURE * question.images)
        return [(match.number, match.similarity) for match in self._index.search(question.key, embedding, count)]

    def _select(
        self, question: CacheQuestion, matches: list[tuple[int, float]], profile: SkipProfile
    ) -> list[Selection]:
        candidates = self._table.candidates(question.key, matches)
        return self._selector.select(candidates, profile=profile, words=question.words, steps=question.steps)

    def _serve(
        self,
        question: CacheQuestion,
        matches: list[tuple[int, float]],
        profile: SkipProfile,
        found: list[Selection],
    ) -> StoreAnswer:
        served = _Served()
        possible = min(question.images, len(found))
        wanted = self._exploration.kept(possible)
        taken: set[int] = set()
        while len(served.starts) < wanted:
            selection = next((each for each in found if each.number not in taken), None)
            if selection is None:
                break
            if self._read(selection.number, selection.step, selection.similarity, served):
                served.holes += selection.hole
                taken.add(selection.number)
            elif (selection.number, selection.step) in served.failed:
                taken.add(selection.number)
            else:  # it is gone, and an earlier latent of its entry may do
                found = self._select(question, matches, profile)
        if len(served.starts) == question.images:
            return self._counted(served, cache_pb2.CACHE_OUTCOME_HIT)
        explored = wanted < possible and len(served.starts) == wanted
        return self._counted(served, cache_pb2.CACHE_OUTCOME_EXPLORED if explored else _miss(served))

    def _counted(self, served: _Served, outcome: CacheOutcome.ValueType) -> StoreAnswer:
        self._counts.add("holes", served.holes)
        return served.answer(outcome)

    def _read(self, number: int, step: int, similarity: float, served: _Served) -> bool:
        """Whether the latent could be served; one that is damaged is gone then."""
        place = self._table.latent(number, step)
        if place is None:
            return False
        entry, digest = place
        name = latent_name(entry.name, step)
        try:
            data = self._files.read(name, digest=digest, size_bytes=entry.latent_bytes)
        except StorageUnavailable as error:
            _log.warning("a cached latent cannot be read", extra={"latent": name, "text": error.message})
            served.failed.add((number, step))
            return False
        if data is None:
            self._lose(number, step, name)
            return False
        self._table.use(number, step)
        self._counts.add("steps_skipped", step)
        served.starts.append(CacheStart(entry=entry.name, step=step, similarity=similarity))
        served.latents.append(RecordedLatent(dtype=entry.dtype, shape=entry.shape, data=data))
        return True

    def _lose(self, number: int, step: int, name: str) -> None:
        """Deletes what is damaged; what was evicted while it was read is no damage."""
        removal = self._table.remove(number, step)
        if removal.latents:
            _log.error("a cached latent is damaged, and is deleted", extra={"latent": name})
            self._counts.add("damaged")
            self._lost(removal)


def _saved_s(question: CacheQuestion, found: list[Selection]) -> float | None:
    """Seconds that the steps take which these save; None where the worker has not said what a step takes."""
    steps = sum(selection.step for selection in found[: question.images])
    return steps * question.step_s if question.step_s > 0.0 else None


def _miss(served: _Served) -> CacheOutcome.ValueType:
    return cache_pb2.CACHE_OUTCOME_UNAVAILABLE if served.failed else cache_pb2.CACHE_OUTCOME_MISS
