"""Finds the latents from which a job's pictures may start: searches the index, selects, and reads the latents.

Every returned latent belongs to a key of the question, and its digest was checked. Any thread may call it, and waits
for the disk only to read the latents.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bottega.addons.cache.skip_profile import SkipProfile, skip_steps
from bottega.cache.index.vector_index import MAX_COUNT
from bottega.cache.latent import RecordedLatent, StoreAnswer, Vector
from bottega.cache.profiles import CacheProfiles
from bottega.cache.records import EntryDisk, latent_name
from bottega.cache.store.contents import Contents, Removal
from bottega.cache.store.selector import Exploration, Selection, select_latents
from bottega.cache.store.settings import CacheCounts, StoreSettings
from bottega.errors import StorageUnavailable
from bottega.sampled_log import SampledLog
from bottega.store_times import LapTimer
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2 import CacheAnswer, CacheOutcome, CacheQuestion, CacheStart
from bottega.v1.trace_pb2 import StoreTimes

# Number of matches for each picture. More than one, because some no longer have the needed latents or only late ones.
_MATCHES_PER_PICTURE = 4
_LEAST_MATCHES = 8

_log = logging.getLogger(__name__)
_unread = SampledLog(
    *(_log, "a cached latent cannot be read and is skipped"),
    more="more cached latents cannot be read and are skipped",
    counted="latents",
    level=logging.WARNING,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The matches of a search of one key."""

    key: str
    latest: int
    """The last step after which a usable latent may have been recorded."""
    matches: list[tuple[int, float]]
    """Numbers and similarities of the entries that were found."""


@dataclass(slots=True)
class _Served:
    """The latents that were read so far for one answer."""

    key: str = ""
    """Key of the question."""
    starts: list[CacheStart] = field(default_factory=list)
    latents: list[RecordedLatent] = field(default_factory=list)
    failed: set[tuple[int, int]] = field(default_factory=set)
    """Latents that could not be read, as entry number and step."""
    holes: int = 0

    def answer(self, outcome: CacheOutcome.ValueType) -> StoreAnswer:
        return StoreAnswer(header=CacheAnswer(hits=self.starts, outcome=outcome), latents=tuple(self.latents))


class Lookup:
    """Finds the latents from which the pictures of a job may start.

    Args:
        lost: Called with latents that were removed because they are damaged.
        has_read: Returns whether all stored entries have been read.
    """

    def __init__(
        self,
        *,
        contents: Contents,
        disk: EntryDisk,
        profiles: CacheProfiles,
        settings: StoreSettings,
        counts: CacheCounts,
        lost: Callable[[Removal], None],
        has_read: Callable[[], bool],
    ) -> None:
        self._table = contents.table
        self._index = contents.index
        self._predictor = contents.predictor
        self._disk = disk
        self._profiles = profiles
        self._exploration = Exploration(settings.exploration, settings.seed)
        self._rows = contents.rows
        self._plain_for_loras = settings.plain_for_loras
        self._counts = counts
        self._lost = lost
        self._has_read = has_read

    def similar(self, question: CacheQuestion, embedding: Vector) -> StoreAnswer:
        """Return latents of similar prompts: at most one for each picture, each of another entry."""
        profile = self._profiles.skip_profile(question.model_hash, question.fidelity, width=embedding.size)
        if profile is None:
            return _Served().answer(cache_pb2.CACHE_OUTCOME_NO_PROFILE)
        searches: list[_Found] = []
        selected: list[Selection] = []
        times, timer = StoreTimes(), LapTimer()
        for key, latest in self._keys(question):
            if len(selected) < question.images:
                found = self._search(key, latest, question, embedding, profile)
                times.search_s += timer.lap()
                if found is not None:
                    searches.append(found)
                    selected = self._awake(question, self._select(question, searches, profile))
                    times.select_s += timer.lap()
        if searches:
            answer = self._serve(question, searches, profile)
            times.read_s = timer.lap() if selected else 0.0
        else:
            answer = _Served().answer(cache_pb2.CACHE_OUTCOME_PREDICTED_MISS)
        answer.header.times.CopyFrom(times)
        return answer

    def pinned(self, question: CacheQuestion, embedding: Vector) -> StoreAnswer:
        """Return the latents that the question names, without checking their similarity. Missing latents are omitted.

        While stored entries are still being read, a missing latent makes the outcome UNAVAILABLE.
        """
        timer, known = LapTimer(), self._has_read()
        keys = {key for key, _ in self._keys(question)}
        served, wanted = _Served(key=question.key), [start for start in question.pinned if start.entry]
        for start in wanted:
            entry = self._table.named(start.entry)
            if entry is None or entry.key not in keys:
                continue
            similarity = self._index.similarity(entry.key, entry.number, embedding)
            if similarity is not None:
                self._read(entry.number, start.step, similarity, served)
        if len(served.starts) == len(wanted):
            answer = served.answer(cache_pb2.CACHE_OUTCOME_HIT)
        else:
            answer = served.answer(_miss(served) if known else cache_pb2.CACHE_OUTCOME_UNAVAILABLE)
        answer.header.times.read_s = timer.lap()
        return answer

    def _keys(self, question: CacheQuestion) -> Iterator[tuple[str, int]]:
        """Yield the keys whose entries may be used, the best first, each with the last step of usable latents."""
        yield question.key, question.steps
        if self._plain_for_loras and question.plain_key:
            yield question.plain_key, question.plain_steps

    def _search(
        self, key: str, latest: int, question: CacheQuestion, embedding: Vector, profile: SkipProfile
    ) -> _Found | None:
        """Search a key. Return None if the search is predicted to find nothing."""
        prediction = self._predictor.predict(key, embedding) if self._predictor else None
        if prediction is not None and not prediction.weight:
            return None
        began = time.perf_counter()
        count = max(_LEAST_MATCHES, _MATCHES_PER_PICTURE * question.images)
        count += len(self._rows.resting(question.key, question.prompt_digest))
        found = _Found(key=key, latest=latest, matches=self._matches(key, embedding, count))
        if len(found.matches) == count and self._are_without_latents(found, question, profile):
            found = _Found(key=key, latest=latest, matches=self._matches(key, embedding, MAX_COUNT))
        if self._predictor is not None and prediction is not None:
            hits = self._select(question, [found], profile)
            lookup_s = time.perf_counter() - began
            self._predictor.record(prediction, hit=bool(hits), lookup_s=lookup_s, saved_s=_saved_s(question, hits))
        return found

    def _matches(self, key: str, embedding: Vector, count: int) -> list[tuple[int, float]]:
        return [(match.number, match.similarity) for match in self._index.search(key, embedding, count)]

    def _are_without_latents(self, found: _Found, question: CacheQuestion, profile: SkipProfile) -> bool:
        """Return whether to search for more matches: too few have a usable latent, and others may be similar enough.

        That happens if latents of early steps, from which any prompt may start, were evicted, or if entries may not be
        used now because of the prompt's recent pictures.
        """
        farthest = found.matches[-1][1]
        similar = skip_steps(profile, similarity=farthest, words=question.words, steps=question.steps)
        awake = self._awake(question, self._select(question, [found], profile))
        return bool(similar) and len(awake) < question.images

    def _awake(self, question: CacheQuestion, selected: Sequence[Selection]) -> list[Selection]:
        """Return the selections that the prompt may use now, given its recent pictures."""
        resting = self._rows.resting(question.key, question.prompt_digest)
        return [selection for selection in selected if selection.noise not in resting]

    def _select(self, question: CacheQuestion, searches: Sequence[_Found], profile: SkipProfile) -> list[Selection]:
        """Return all latents that are similar enough, also ones that rest, those of the first search first."""
        selected: list[Selection] = []
        for found in searches:
            selected += select_latents(
                self._table.candidates(found.key, found.matches),
                profile=profile,
                words=question.words,
                steps=question.steps,
                latest=found.latest,
            )
        return selected

    def _serve(
        self,
        question: CacheQuestion,
        searches: Sequence[_Found],
        profile: SkipProfile,
    ) -> StoreAnswer:
        served = _Served(key=question.key)
        key, prompt = question.key, question.prompt_digest
        found = self._select(question, searches, profile)
        awake = self._awake(question, found)
        rests = len(awake) < min(question.images, len(found))
        possible = min(question.images, len(awake))
        wanted = self._exploration.kept(possible)
        taken: set[int] = set()
        while len(served.starts) < wanted:
            selection = next((candidate for candidate in awake if candidate.number not in taken), None)
            if selection is None:
                break
            # Another question about the prompt may have reserved it, or an earlier latent of this answer has the same
            # noise.
            if not self._rows.reserve(key, prompt, selection.noise, picture_s(question)):
                taken.add(selection.number)
                rests = True
            elif self._read(selection.number, selection.step, selection.similarity, served):
                served.holes += selection.hole
                taken.add(selection.number)
            else:
                self._rows.release(key, prompt, selection.noise)
                if (selection.number, selection.step) in served.failed:
                    taken.add(selection.number)
                else:  # it is gone, and an earlier latent of its entry may do
                    awake = self._awake(question, self._select(question, searches, profile))
        if len(served.starts) == question.images:
            return self._counted(served, cache_pb2.CACHE_OUTCOME_HIT)
        if wanted < possible and len(served.starts) == wanted:
            return self._counted(served, cache_pb2.CACHE_OUTCOME_EXPLORED)
        rested = rests and not served.failed
        return self._counted(served, cache_pb2.CACHE_OUTCOME_RESTING if rested else _miss(served))

    def _counted(self, served: _Served, outcome: CacheOutcome.ValueType) -> StoreAnswer:
        self._counts.add("holes", served.holes)
        return served.answer(outcome)

    def _read(self, number: int, step: int, similarity: float, served: _Served) -> bool:
        """Read a latent into `served`, and return whether that worked. If the latent is damaged, remove it."""
        place = self._table.latent(number, step)
        if place is None:
            return False
        entry, digest = place
        name = latent_name(entry.name, step)
        try:
            data = self._disk.read(name, digest=digest, size_bytes=entry.latent_bytes)
        except StorageUnavailable as error:
            _unread.log_event(details={"latent": name, "text": error.message})
            served.failed.add((number, step))
            return False
        if data is None:
            self._lose(number, step, name)
            return False
        self._table.use(number, step)
        served.starts.append(
            CacheStart(entry=entry.name, step=step, similarity=similarity, without_loras=entry.key != served.key)
        )
        served.latents.append(RecordedLatent(dtype=entry.dtype, shape=entry.shape, data=data))
        return True

    def _lose(self, number: int, step: int, name: str) -> None:
        """Remove a damaged latent, unless it was evicted while it was read."""
        removal = self._table.remove(number, step)
        if removal.latents:
            _log.error("a cached latent is damaged and was deleted", extra={"latent": name})
            self._counts.add("damaged")
            self._lost(removal)


def picture_s(question: CacheQuestion) -> float:
    """Return the seconds that a picture of the question takes; 0 if the worker did not report its step time."""
    return question.steps * max(0.0, question.step_s)


def _saved_s(question: CacheQuestion, found: list[Selection]) -> float | None:
    """Return the seconds that the selected latents save; None if the worker did not report its step time."""
    steps = _saved_steps(question, found[: question.images])
    return steps * question.step_s if question.step_s > 0.0 else None


def _saved_steps(question: CacheQuestion, starts: Iterable[CacheStart | Selection]) -> int:
    return sum(max(0, start.step - max(0, question.repeated_steps)) for start in starts)


def _miss(served: _Served) -> CacheOutcome.ValueType:
    return cache_pb2.CACHE_OUTCOME_UNAVAILABLE if served.failed else cache_pb2.CACHE_OUTCOME_MISS
