"""The in-memory state of a store: entry table, embedding index, recent pictures by prompt, and match predictor.

They change together, so that an entry in the table is also in the index. Every change of the table must also be written
to the disk: `take_changes` returns the changes. Any thread may call both classes, and no call of the table waits long,
because it uses neither disk nor index.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bottega.addons.interface.store_link import rank_stores
from bottega.blobstore.records import RecordChanges
from bottega.cache.eviction import EvictionHeap, EvictionPolicy, Usage
from bottega.cache.index.vector_index import EntryIndex
from bottega.cache.latent import Entry, EntryRecord
from bottega.cache.predictor import MatchPredictor
from bottega.cache.records import latent_name, picture_name, usage_values
from bottega.cache.store.selector import Candidate, PromptRows
from bottega.v1.cache_pb2 import CacheModelStats


@dataclass(slots=True, kw_only=True)
class Removal:
    """The result of removing latents from the table."""

    entries: list[Entry] = field(default_factory=list)
    """Entries whose last latent was removed."""
    latents: int = 0
    """Number of removed latents."""
    files: list[str] = field(default_factory=list)
    """Names of the files to delete."""


@dataclass(slots=True)
class _Kept:
    """An entry, with the digests of its latents by step."""

    entry: Entry
    digests: dict[int, bytes]
    hits: int


class EntryTable:
    """The entries of a store, with the usage of their latents.

    Args:
        policy: Determines which latents are evicted first.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._lock = threading.Lock()
        self._heap: EvictionHeap[tuple[int, int]] = EvictionHeap(policy)
        self._kept: dict[int, _Kept] = {}
        self._numbers: dict[str, int] = {}
        self._keys: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        self._models: Counter[str] = Counter()
        self._model_latents: Counter[str] = Counter()
        self._model_keys: Counter[str] = Counter()
        self._picture_bytes = 0
        self._changes = RecordChanges()
        # The policy's clock counts questions, including those before the last start.
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        """Bytes of all latents, and of the small pictures of their entries."""
        return self._heap.size_bytes + self._picture_bytes

    @property
    def now(self) -> float:
        """The current time on the policy's clock, which counts questions of workers."""
        return self._now

    def tick(self) -> None:
        """Advance the policy's clock by one question."""
        with self._lock:
            self._now += 1.0

    def add(self, record: EntryRecord) -> None:
        """Add an entry that was written to the disk."""
        entry = record.entry
        with self._lock:
            digests = {step: latent.digest for step, latent in record.latents.items()}
            self._kept[entry.number] = _Kept(entry=entry, digests=digests, hits=record.hits)
            self._numbers[entry.name] = entry.number
            self._model_keys[entry.model_hash] += not self._keys[entry.key]
            self._keys[entry.key] += 1
            self._places[entry.place] += 1
            self._models[entry.model_hash] += 1
            self._model_latents[entry.model_hash] += len(digests)
            self._picture_bytes += entry.picture.size_bytes
            for step, latent in record.latents.items():
                self._heap.add((entry.number, step), latent.usage, size_bytes=entry.latent_bytes)
                self._now = max(self._now, latent.usage.used_at)

    def all_keys(self) -> list[str]:
        """Return the keys that have entries."""
        with self._lock:
            return list(self._keys)

    def has_key(self, key: str) -> bool:
        """Return whether the key has entries."""
        return key in self._keys

    def named(self, name: str) -> Entry | None:
        """Return the entry with that name, or None."""
        with self._lock:
            number = self._numbers.get(name)
            return self._kept[number].entry if number is not None else None

    def newest(self, model_hash: str, limit: int) -> list[Entry]:
        """Return up to `limit` entries, newest first.

        Args:
            model_hash: Hash of the model; "" means any model.
        """
        with self._lock:
            entries = [kept.entry for kept in self._kept.values()]
        of_model = (entry for entry in entries if not model_hash or entry.model_hash == model_hash)
        return heapq.nlargest(limit, of_model, key=lambda entry: entry.number)

    def steps_and_hits(self, number: int) -> tuple[list[int], int]:
        """Return the steps of an entry's latents, and how many pictures started from it; ([], 0) if it was removed."""
        with self._lock:
            kept = self._kept.get(number)
            return (sorted(kept.digests), kept.hits) if kept is not None else ([], 0)

    def candidates(self, key: str, similarities: Iterable[tuple[int, float]]) -> list[Candidate]:
        """Return the entries with these numbers and similarities as candidates. Omit those of other keys."""
        found = []
        with self._lock:
            for number, similarity in similarities:
                kept = self._kept.get(number)
                if kept is not None and kept.entry.key == key:
                    steps = tuple(kept.digests)
                    noise = kept.entry.noise
                    found.append(
                        Candidate(number=number, noise=noise, similarity=similarity, steps=steps, hits=kept.hits)
                    )
        return found

    def latent(self, number: int, step: int) -> tuple[Entry, bytes] | None:
        """Return the entry of a latent and the digest of the latent, or None if the latent was removed."""
        with self._lock:
            kept = self._kept.get(number)
            digest = kept.digests.get(step) if kept is not None else None
            return (kept.entry, digest) if kept is not None and digest is not None else None

    def take_back_hit(self, number: int) -> None:
        """Subtract a start from an entry's count, because the latent arrived too late or did not fit.

        Does nothing if the entry was removed.
        """
        with self._lock:
            kept = self._kept.get(number)
            if kept is not None and kept.hits:
                kept.hits -= 1
                self._changes.uses[number] = (kept.hits,)

    def use(self, number: int, step: int) -> None:
        """Count that a latent was sent to start a picture from. Does nothing if the latent was removed."""
        with self._lock:
            kept = self._kept.get(number)
            if kept is not None and step in kept.digests:
                kept.hits += 1
                self._changes.uses[number] = (kept.hits,)
                self._changes.part_uses[number, step] = usage_values(self._heap.use((number, step), self._now))

    def remove(self, number: int, step: int) -> Removal:
        """Remove a latent if it exists."""
        removal = Removal()
        with self._lock:
            if (number, step) in self._heap:
                self._heap.remove((number, step))
                self._drop(number, step, removal)
        return removal

    def evict(self, until_bytes: int, until_entries: int) -> Removal:
        """Remove latents in eviction order, until at most that many bytes and entries are left.

        The picture of an entry is removed with its last latent.
        """
        removal = Removal()
        with self._lock:
            while self._kept and (self.size_bytes > until_bytes or len(self._kept) > until_entries):
                for place in self._heap.evict(self._heap.size_bytes - 1):
                    self._drop(*place, removal)
        return removal

    def clear(self, model_hash: str) -> Removal:
        """Remove all entries of a model; "" means all models."""
        removal = Removal()
        with self._lock:
            wanted = [kept for kept in self._kept.values() if not model_hash or kept.entry.model_hash == model_hash]
            for kept in wanted:
                for step in tuple(kept.digests):
                    self._heap.remove((kept.entry.number, step))
                    self._drop(kept.entry.number, step, removal)
        return removal

    def numbers(self) -> list[int]:
        """Return the numbers of all entries."""
        with self._lock:
            return list(self._kept)

    def leave(self, numbers: Iterable[int]) -> list[Entry]:
        """Remove the entries with these numbers and return them. The records and files stay: others have them now."""
        removal = Removal()
        with self._lock:
            for number in numbers:
                steps = tuple(self._kept[number].digests) if number in self._kept else ()
                for step in steps:
                    self._heap.remove((number, step))
                    self._drop(number, step, removal)
                self._changes.gone.discard(number)
                self._changes.gone_parts.difference_update((number, step) for step in steps)
        return removal.entries

    def take_changes(self) -> RecordChanges:
        """Return the changes since the last call, which have to be written to the disk."""
        with self._lock:
            taken, self._changes = self._changes, RecordChanges()
            return taken

    def elsewhere(self, cache: str, caches: Collection[str]) -> int:
        """Return how many entries do not belong to `cache` if the living ones are `caches`."""
        with self._lock:
            places = list(self._places.items())
        return sum(count for place, count in places if rank_stores(caches, place)[0] != cache)

    def models(self) -> list[CacheModelStats]:
        """Return the number of entries, latents and keys of each model. The caller sets `has_profile`."""
        with self._lock:
            return [
                CacheModelStats(
                    model_hash=model,
                    entries=self._models[model],
                    latents=self._model_latents[model],
                    keys=self._model_keys[model],
                )
                for model in sorted(self._models)
            ]

    def _drop(self, number: int, step: int, removal: Removal) -> None:
        """Remove a latent from everything but the eviction heap."""
        kept = self._kept[number]
        entry = kept.entry
        del kept.digests[step]
        removal.latents += 1
        removal.files.append(latent_name(entry.name, step))
        self._changes.part_uses.pop((number, step), None)
        self._model_latents[entry.model_hash] -= 1
        if kept.digests:
            self._changes.gone_parts.add((number, step))
            return
        del self._kept[number]
        del self._numbers[entry.name]
        self._picture_bytes -= entry.picture.size_bytes
        removal.entries.append(entry)
        removal.files.append(picture_name(entry.name))
        self._changes.uses.pop(number, None)
        self._changes.gone.add(number)
        _less(self._places, entry.place)
        if _less(self._keys, entry.key):
            _less(self._model_keys, entry.model_hash)
        if _less(self._models, entry.model_hash):
            del self._model_latents[entry.model_hash]


def _less(counts: Counter[str], name: str) -> bool:
    """Decrement a count, and delete it at 0. Return whether it was deleted."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
        return True
    return False


def new_usage(step: int, at: float) -> Usage:
    """Return the usage of a latent that is recorded at the time `at` of the policy's clock."""
    return Usage(step=step, used_at=at, created_at=at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The in-memory state of a store."""

    table: EntryTable
    index: EntryIndex
    predictor: MatchPredictor | None
    rows: PromptRows
    """The recent pictures of each prompt, which decide which entries the prompt may not use now."""

    def load(self, key: str, records: Sequence[EntryRecord]) -> None:
        """Add stored entries of one key. Call `loaded` after the last ones."""
        numbers = np.array([record.entry.number for record in records], np.int64)
        vectors = np.stack([_vector(record) for record in records])
        self.index.load(key, numbers, vectors)
        for record in records:
            self.table.add(record)

    def loaded(self) -> None:
        """Finish loading, after all stored entries were added. Raises StorageUnavailable."""
        self.index.loaded()
        for key in self.table.all_keys():
            self._tell_predictor(key)

    def prepare(self, record: EntryRecord) -> None:
        """Add an entry to the index before it is written. Raises ValueError or QueueFull if the index refuses it."""
        self.index.add(record.entry.key, record.entry.number, _vector(record))

    def take_back(self, record: EntryRecord) -> None:
        """Remove an entry from the index because it could not be written."""
        self.index.remove(record.entry.key, record.entry.number)

    def add(self, record: EntryRecord) -> None:
        """Add an entry that was written to the disk, so that lookups can return it."""
        self.table.add(record)
        self._tell_predictor(record.entry.key)

    def forget(self, entries: Iterable[Entry]) -> None:
        """Remove entries whose last latent was removed from the table."""
        changes: Counter[str] = Counter()
        for entry in entries:
            self.index.remove(entry.key, entry.number)
            changes[entry.key] += 1
        for key, number in changes.items():
            self._tell_predictor(key, number)

    def close(self) -> None:
        """Stop the background work of the index and the predictor."""
        if self.predictor is not None:
            self.predictor.close()
        self.index.close()

    def _tell_predictor(self, key: str, changes: int = 1) -> None:
        if self.predictor is not None:
            self.predictor.changed(key, entries=self.index.entries(key), changes=changes)


def _vector(record: EntryRecord) -> np.ndarray:
    return np.frombuffer(record.embedding, np.float32)
