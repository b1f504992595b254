"""An index for each key, so that a search finds only entries that were added under its key.

A key without entries has no index.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.key_index import KeyIndex
from bottega.cache.index.vector_index import MAX_COUNT, IndexSettings, Match, Numbers, Vectors, unit_vectors
from bottega.errors import QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStatistics:
    """Statistics of an index."""

    keys: int
    """Number of keys with entries."""
    entries: int
    sketched_entries: int
    """Number of entries that have a sketch."""
    size_bytes: int
    """Bytes of vectors and sketches in memory."""


class KeyedIndex:
    """An `EntryIndex` with an index for each key. Any thread may use it. Close it at the end.

    Vectors need not have length 1. Their similarity is their cosine.

    Args:
        max_entries: Upper bound on the number of entries of all keys.
    """

    def __init__(self, *, max_entries: int = 2_000_000, settings: IndexSettings | None = None) -> None:
        self._max_entries = max_entries
        self._settings = settings or IndexSettings()
        self._lock = threading.Lock()
        self._indexes: dict[str, KeyIndex] = {}
        self._entries = 0
        self._closed = False

    def __len__(self) -> int:
        return self._entries

    def load(self, key: str, numbers: Numbers, vectors: NDArray[np.floating]) -> None:
        """Add many entries, for example when a service starts. If this raises, none was added.

        Args:
            numbers: [n], without duplicates.
            vectors: [n, width].

        Raises the same errors as `add`.
        """
        made = unit_vectors(vectors)
        if made.ndim != 2 or len(made) != len(numbers) or len(np.unique(numbers)) != len(numbers):
            raise ValueError("numbers must be unique, with one vector for each")
        if len(numbers):
            _check_number(int(numbers.min()))
            self._add(key, numbers, made)

    def add(self, key: str, number: int, vector: NDArray[np.floating]) -> None:
        """Add an entry, or replace the entry of the key with that number (0 or more).

        Raises ValueError if the vector is zero, not finite or of another width than the others of the key, and
        QueueFull if there are too many entries.
        """
        _check_number(number)
        self._add(key, np.array([number], np.int64), unit_vectors(vector)[None])

    def remove(self, key: str, number: int) -> bool:
        """Remove an entry, so that later searches do not find it. Return whether it existed."""
        index = self._indexes.get(key)
        removed = index is not None and index.remove(number)
        if removed:
            with self._lock:
                self._entries -= 1
                self._forget_if_empty(key)
        return removed

    def search(self, key: str, vector: NDArray[np.floating], count: int) -> list[Match]:
        """Return up to `count` (1 to 64) of the key's most similar entries, the most similar first.

        Raises ValueError if the vector is zero, not finite or of the wrong width.
        """
        if not 1 <= count <= MAX_COUNT:
            raise ValueError(f"count must be from 1 to {MAX_COUNT}")
        wanted = unit_vectors(vector)
        index = self._indexes.get(key)
        if index is None:
            return []
        _check_width(index, wanted)
        return index.search(wanted, count)

    def similarity(self, key: str, number: int, vector: NDArray[np.floating]) -> float | None:
        """Return the cosine of a vector and an entry's vector, or None if the entry does not exist.

        Raises the same errors as `search`.
        """
        index = self._indexes.get(key)
        stored = None if index is None else index.vector(number)
        if index is None or stored is None:
            return None
        wanted = unit_vectors(vector)
        _check_width(index, wanted)
        return min(float(stored @ wanted), 1.0)

    def sample(self, key: str, count: int) -> Vectors:
        """Return the vectors of up to `count` random entries of the key, [at most count, width], all equally likely."""
        index = self._indexes.get(key)
        if index is None:
            return np.empty((0, 0), np.float32)
        numbers = np.random.default_rng().permutation(index.numbers())
        return index.vectors(numbers[:count])

    def entries(self, key: str) -> int:
        """Return the number of entries of a key."""
        index = self._indexes.get(key)
        return 0 if index is None else len(index)

    def statistics(self) -> IndexStatistics:
        """Return the current statistics."""
        with self._lock:
            indexes = list(self._indexes.values())
        return IndexStatistics(
            keys=len(indexes),
            entries=self._entries,
            sketched_entries=sum(index.sketched for index in indexes),
            size_bytes=sum(index.size_bytes for index in indexes),
        )

    def close(self) -> None:
        """Refuse new entries from now on. May be called again."""
        with self._lock:
            self._closed = True
            indexes = list(self._indexes.values())
        for index in indexes:
            index.close()

    def _add(self, key: str, numbers: Numbers, vectors: Vectors) -> None:
        self._reserve(len(numbers))
        new = 0
        try:
            new = self._add_to(key, numbers, vectors)
        finally:
            with self._lock:
                self._entries -= len(numbers) - new

    def _add_to(self, key: str, numbers: Numbers, vectors: Vectors) -> int:
        """Add entries to the key's index. Return how many numbers were new."""
        while True:
            index = self._index(key, vectors.shape[1])
            _check_width(index, vectors)
            try:
                if len(numbers) == 1:
                    return int(index.add(int(numbers[0]), vectors[0]))
                return index.add_all(numbers, vectors)
            except LookupError:  # the key just lost its last entry, and its index with it
                if self._closed:
                    raise

    def _reserve(self, entries: int) -> None:
        with self._lock:
            if self._closed:
                raise LookupError("the index is closed")
            if self._entries + entries > self._max_entries:
                raise QueueFull(f"the index is full: it has {self._max_entries} entries (max_entries)")
            self._entries += entries

    def _index(self, key: str, width: int) -> KeyIndex:
        with self._lock:
            index = self._indexes.get(key)
            if index is None:
                index = self._indexes[key] = KeyIndex(width, self._settings)
            return index

    def _forget_if_empty(self, key: str) -> None:
        index = self._indexes.get(key)
        if index is not None and index.close_if_empty():
            del self._indexes[key]


def _check_number(number: int) -> None:
    if number < 0:
        raise ValueError("an entry's number must be at least 0")


def _check_width(index: KeyIndex, vectors: Vectors) -> None:
    if vectors.shape[-1] != index.width:
        raise ValueError(f"vectors of this key must have {index.width} dimensions, not {vectors.shape[-1]}")
