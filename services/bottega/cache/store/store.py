"""The store of an approximate cache: entries in memory and on disk, answers to workers' questions, and recordings.

Any thread may call it. `service.py` converts between it and gRPC. Workers send questions and recordings over tensor
connections.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from bottega.addons.cache.starts import prompt_digest
from bottega.cache.index.key_index import KeyedIndex
from bottega.cache.index.vector_index import EntryIndex
from bottega.cache.latent import (
    MAX_STEP,
    Entry,
    EntryDetails,
    RecordedLatent,
    StoreAnswer,
    Vector,
    check_key,
    checked_embedding,
    to_recording,
)
from bottega.cache.predictor import MatchPredictor
from bottega.cache.profiles import CacheProfiles
from bottega.cache.records import EntryDisk, LocalEntries, picture_name
from bottega.cache.store.contents import Contents, EntryTable
from bottega.cache.store.lookup import Lookup, picture_s
from bottega.cache.store.selector import PromptRows
from bottega.cache.store.settings import CacheCounts, LatentStatistics, StoreSettings
from bottega.cache.store.writer import CacheWriter
from bottega.clocks import Clock
from bottega.errors import StorageUnavailable
from bottega.v1 import generation_pb2
from bottega.v1.cache_pb2 import (
    CACHE_OUTCOME_UNAVAILABLE,
    CacheAnswer,
    CacheEntry,
    CacheModelStats,
    CacheProfile,
    CacheQuestion,
    CacheRecording,
    CacheStarts,
)

_MOST_IMAGES = 8
# Seconds between counts of the entries that belong to other caches.
_COUNT_S = 60.0
_DIGEST = re.compile(r"[0-9a-f]{64}")
_APPROXIMATE = (generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST)


class LatentStore:
    """A store of cached latents. Call `start` first and `close` at the end, which also closes the index.

    Args:
        index: By default, it is in memory.
        disk: By default, the entries are in the folder.
        clock: The clock for the times of recordings and of prompts' last pictures.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        index: EntryIndex | None = None,
        disk: EntryDisk | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock = clock or Clock()
        self._name, self._caches = "", frozenset[str]()
        self._entries_elsewhere, self._elsewhere_due_s = 0, 0.0
        self._settings = settings
        self._counts = CacheCounts()
        self._table = EntryTable(settings.policy)
        index = index if index is not None else KeyedIndex()
        predictor = MatchPredictor(index.sample) if settings.predictor else None
        self._rows = PromptRows(settings.row_pictures, clock.monotonic)
        self._contents = Contents(table=self._table, index=index, predictor=predictor, rows=self._rows)
        disk = disk if disk is not None else LocalEntries(settings.folder, min_free_bytes=settings.min_free_bytes)
        self._disk = disk
        self._profiles = CacheProfiles(settings.folder / "profiles")
        self._doorkeeper = Doorkeeper() if settings.doorkeeper else None
        self._writer = CacheWriter(
            settings,
            contents=self._contents,
            disk=disk,
            profiles=self._profiles,
            counts=self._counts,
            clock=clock,
        )
        self._lookup = Lookup(
            contents=self._contents,
            disk=disk,
            profiles=self._profiles,
            settings=settings,
            counts=self._counts,
            lost=self._writer.lose,
            has_read=lambda: self._writer.has_loaded,
        )

    def start(self) -> None:
        """Lock the folder and open the store. Stored entries are read in the background.

        A disk that fails is reported in the statistics, and tried again. Raises Unavailable if another process uses the
        folder, StorageUnavailable if it cannot be created, and ConfigError if its database belongs to another program.
        """
        self._profiles.open()
        self._writer.start()

    def close(self) -> None:
        """Write the pending recordings, and stop. Does nothing if the store was not started."""
        self._writer.close()
        self._contents.close()

    def flush(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until stored entries are read and recordings are written. Return whether they are."""
        return self._writer.flush(timeout_s)

    def ask(self, question: CacheQuestion, embedding: Vector) -> StoreAnswer:
        """Return the latents from which a job's pictures may start, and whether its first picture is to be recorded.

        Raises ValueError if a rule of cache.proto is broken.

        Args:
            embedding: Embedding of the job's prompt.
        """
        _check(question)
        checked_embedding(embedding)
        self._table.tick()
        if question.pinned:
            answer = _answer(lambda: self._lookup.pinned(question, embedding))
            answer.header.counts_starts = True
            self._counts.lookup(answer.header.outcome)
            return answer
        repeated = self._is_repeated(question)
        if question.images and question.fidelity in _APPROXIMATE:
            answer = _answer(lambda: self._lookup.similar(question, embedding))
            self._counts.lookup(answer.header.outcome)
            for place in range(len(answer.latents), question.images):
                self._rows.note(question.key, question.prompt_digest, question.seed + place, picture_s(question))
        else:
            answer = StoreAnswer(header=CacheAnswer(), latents=())
        answer.header.record = repeated and not answer.latents and not self._writer.trouble
        answer.header.counts_starts = True
        return answer

    def count_starts(self, starts: CacheStarts) -> None:
        """Count the steps that a worker skipped, and release unused latents for the prompt's next picture.

        Raises ValueError if a rule of cache.proto is broken.
        """
        most = starts.pictures * MAX_STEP
        if not (0 <= starts.pictures <= _MOST_IMAGES and 0 <= starts.skipped_steps <= most):
            raise ValueError(f"a report must be of 0 to {_MOST_IMAGES} pictures and at most {MAX_STEP} steps each")
        if len(starts.unused) > _MOST_IMAGES:
            raise ValueError(f"a report must name at most {_MOST_IMAGES} unused entries")
        _check_row(starts.key, starts.prompt_digest)
        self._counts.add("steps_skipped", starts.skipped_steps)
        for name in starts.unused:
            entry = self._table.named(name)
            if entry is not None:
                self._table.take_back_hit(entry.number)
                self._rows.release(starts.key, starts.prompt_digest, entry.noise)

    def record(
        self,
        recording: CacheRecording,
        *,
        embedding: Vector,
        picture: npt.NDArray[np.uint8],
        latents: Sequence[RecordedLatent],
    ) -> None:
        """Queue the latents of a picture for writing, and return at once. If the queue is full, drop and count them.

        Raises ValueError if a rule of cache.proto is broken.

        Args:
            picture: [height, width, 3]; copied.
            latents: One for each step in the header, in the same order; copied.
        """
        self._writer.record(to_recording(recording, embedding=embedding, picture=picture, latents=latents))
        drawn = recording.parameters
        if drawn.HasField("seed"):
            self._rows.note_once(recording.key, prompt_digest(drawn.prompt), drawn.seed)

    def lookups(self) -> dict[str, int]:
        """Return the number of questions since the start, by outcome."""
        return self._counts.lookups()

    def statistics(self) -> LatentStatistics:
        """Return the current statistics."""
        counts, waiting = self._counts, self._writer.waiting
        predictor = self._contents.predictor
        return LatentStatistics(
            models=self._models(),
            bytes=self._table.size_bytes,
            budget_bytes=self._settings.budget_bytes,
            lookups=counts.lookups(),
            steps_skipped=counts.total("steps_skipped"),
            recorded=counts.total("recorded"),
            evictions=counts.total("evictions"),
            holes=counts.total("holes"),
            damaged=counts.total("damaged"),
            dropped=counts.dropped(),
            trouble=self._writer.trouble,
            predictor=predictor.statistics() if predictor is not None else None,
            waiting=waiting[0],
            waiting_bytes=waiting[1],
            elsewhere=self._elsewhere(),
            sharing=self._disk.sharing,
        )

    def set_caches(self, cache: str, caches: frozenset[str]) -> None:
        """Note the name of this cache, and those of all caches that workers know."""
        if (cache, caches) != (self._name, self._caches):
            self._name, self._caches, self._elsewhere_due_s = cache, caches, 0.0

    def entry(self, name: str) -> EntryDetails | None:
        """Return the entry with this name, or None. Raises StorageUnavailable, DataLoss."""
        entry = self._table.named(name)
        if entry is None:
            return None
        found = self._described([entry])
        return EntryDetails(entry=found[0], picture=self._picture(entry)) if found else None

    def entries(self, model_hash: str, limit: int) -> list[CacheEntry]:
        """Return up to `limit` entries, newest first. Raises StorageUnavailable, DataLoss.

        Args:
            model_hash: Hash of the model; "" means any model.
        """
        return self._described(self._table.newest(model_hash, limit))

    def clear(self, model_hash: str = "") -> int:
        """Delete the entries of a model, or of all models for "". Return how many. Raises StorageUnavailable."""
        return self._writer.clear(model_hash)

    def profiles(self) -> list[CacheProfile]:
        """Return the profiles of all models."""
        return self._profiles.all()

    def set_profile(self, profile: CacheProfile) -> CacheProfile:
        """Replace the profile of a model, for all caches that share entries. A profile without classes removes it.

        Raises ValueError if it is invalid, and StorageUnavailable.
        """
        self._profiles.set(profile)
        self._disk.set_profile(profile.model_hash, profile.SerializeToString(deterministic=True))
        return profile

    def add_profile(self, profile: CacheProfile) -> None:
        """Add a profile, unless the model has one. Raises ValueError, StorageUnavailable."""
        if not self._profiles.has(profile.model_hash):
            self._profiles.set(profile)

    def _elsewhere(self) -> int:
        """Return how many entries belong to other caches, as of the last minute: it takes a while."""
        now_s = self._clock.monotonic()
        if self._name in self._caches and now_s >= self._elsewhere_due_s:
            self._elsewhere_due_s = now_s + _COUNT_S
            self._entries_elsewhere = self._table.elsewhere(self._name, self._caches)
        return self._entries_elsewhere

    def _is_repeated(self, question: CacheQuestion) -> bool:
        known = self._doorkeeper is None or self._doorkeeper.admits(question.key, question.job)
        return known or self._table.has_key(question.key)

    def _models(self) -> tuple[CacheModelStats, ...]:
        found = self._table.models()
        for model in found:
            model.has_profile = self._profiles.has(model.model_hash)
        return tuple(found)

    def _described(self, entries: Sequence[Entry]) -> list[CacheEntry]:
        parameters = self._writer.parameters(entries)
        found = []
        for entry in entries:
            steps, hits = self._table.steps_and_hits(entry.number)
            if steps and entry.number in parameters:
                described = CacheEntry(
                    entry=entry.name,
                    model_hash=entry.model_hash,
                    key=entry.key,
                    steps=steps,
                    bytes=len(steps) * entry.latent_bytes + entry.picture.size_bytes,
                    recorded_s=entry.recorded_s,
                    hits=hits,
                )
                described.parameters.ParseFromString(parameters[entry.number])
                found.append(described)
        return found

    def _picture(self, entry: Entry) -> np.ndarray | None:
        picture = entry.picture
        data = self._disk.read(picture_name(entry.name), digest=picture.digest, size_bytes=picture.size_bytes)
        return np.frombuffer(data, np.uint8).reshape(picture.height, picture.width, 3) if data is not None else None


def _answer(find: Callable[[], StoreAnswer]) -> StoreAnswer:
    """Return what `find` returns; if the database of the index is away, an answer that says so."""
    try:
        return find()
    except StorageUnavailable:  # the index has logged it
        return StoreAnswer(header=CacheAnswer(outcome=CACHE_OUTCOME_UNAVAILABLE), latents=())


def _check(question: CacheQuestion) -> None:
    _check_row(question.key, question.prompt_digest)
    if question.plain_key:
        check_key(question.plain_key)
    if not 0 <= question.images <= _MOST_IMAGES or len(question.pinned) > _MOST_IMAGES:
        raise ValueError(f"a question must be for at most {_MOST_IMAGES} pictures")
    if question.steps < 1 or question.words < 0:
        raise ValueError("a question must have at least 1 step and at least 0 words")


def _check_row(key: str, digest: str) -> None:
    """Raise ValueError if `key` is not a key, or `digest` not the digest of a prompt."""
    check_key(key)
    if digest and not _DIGEST.fullmatch(digest):
        raise ValueError("the digest of a prompt must have 64 hex digits")


# Maximum number of remembered keys, 150 bytes each. The least recently used ones are removed first.
_MOST_KEYS = 65_536


class Doorkeeper:
    """Remembers which keys were asked for before. Any thread may call it."""

    def __init__(self, most_keys: int = _MOST_KEYS) -> None:
        self._most_keys = most_keys
        # By key: the first job that asked for it; empty once a second job has asked or if it is unknown.
        self._seen: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def admits(self, key: str, job: str) -> bool:
        """Return whether another job has asked for the key before, and remember this question.

        Args:
            key: The key, in hex.
            job: ID of the job that asks. Its retries do not count as another job. "" (unknown) counts as another job.
        """
        short, asker = bytes.fromhex(key), _short(job)
        with self._lock:
            first = self._seen.get(short)
            admitted = first is not None and not (first and first == asker)
            self._seen[short] = b"" if admitted else asker
            self._seen.move_to_end(short)
            if len(self._seen) > self._most_keys:
                self._seen.popitem(last=False)
        return admitted


def _short(job: str) -> bytes:
    return hashlib.blake2b(job.encode(), digest_size=8).digest() if job else b""
