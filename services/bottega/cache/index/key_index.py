"""The index of the cache. It has a separate index for each key, so a search finds only entries of its key.

A key without entries has no index. A small index compares the query with every vector (`FlatIndex`). A large one first
compares short codes of the vectors, called sketches (`SketchedIndex`). Adding a vector to a `FlatIndex`, or removing
one, takes constant time on average.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import faiss
import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.device_index import DeviceIndex
from bottega.cache.index.sketched_index import SketchedIndex
from bottega.cache.index.vector_index import MAX_COUNT, IndexSettings, Match, Numbers, Vectors, unit_vectors
from bottega.errors import QueueFull


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStatistics:
    """Statistics of an index."""

    keys: int
    """Number of keys with entries."""
    entries: int
    sketched_entries: int
    """Number of entries that have a sketch: a short code, which a large index compares first."""
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

    def loaded(self) -> None:
        """Do nothing, because nothing is stored."""

    def probe(self) -> None:
        """Do nothing, because memory is always there."""

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


_LEAST_ROWS = 4


class FlatIndex:
    """An exact `VectorIndex`. Only one thread may use it at a time."""

    def __init__(self, width: int) -> None:
        self._vectors: Vectors = np.empty((_LEAST_ROWS, width), np.float32)
        self._numbers: Numbers = np.empty(_LEAST_ROWS, np.int64)
        self._rows: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, number: int) -> bool:
        return number in self._rows

    @property
    def width(self) -> int:
        """Number of dimensions of its vectors."""
        return int(self._vectors.shape[1])

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays, including unused rows."""
        return self._vectors.nbytes + self._numbers.nbytes

    def add(self, number: int, vector: Vectors) -> bool:
        row = self._rows.get(number)
        if row is not None:
            self._vectors[row] = vector
            return False
        row = len(self._rows)
        if row == len(self._numbers):
            self._resize(2 * row)
        self._vectors[row], self._numbers[row] = vector, number
        self._rows[number] = row
        return True

    def add_all(self, numbers: Numbers, vectors: Vectors) -> None:
        """Add many vectors whose numbers are not in the index yet."""
        first = len(self._rows)
        last = first + len(numbers)
        if last > len(self._numbers):
            self._resize(last)
        self._vectors[first:last], self._numbers[first:last] = vectors, numbers
        self._rows.update(zip(numbers.tolist(), range(first, last), strict=True))

    def remove(self, number: int) -> bool:
        """Remove a vector. The last row of the array fills the gap."""
        row = self._rows.pop(number, None)
        if row is None:
            return False
        last = len(self._rows)
        if row != last:
            self._vectors[row] = self._vectors[last]
            self._numbers[row] = self._numbers[last]
            self._rows[int(self._numbers[row])] = row
        if _LEAST_ROWS <= last <= len(self._numbers) // 4:
            self._resize(2 * last)
        return True

    def search(self, vector: Vectors, count: int) -> list[Match]:
        rows = len(self._rows)
        if rows == 0:
            return []
        similarities, found = faiss.knn(
            vector[None], self._vectors[:rows], min(count, rows), metric=faiss.METRIC_INNER_PRODUCT
        )
        return [
            Match(number=int(self._numbers[row]), similarity=float(similarity))
            for similarity, row in zip(similarities[0], found[0], strict=True)
        ]

    def vector(self, number: int) -> Vectors | None:
        """Return a copy of the vector with that number, or None."""
        row = self._rows.get(number)
        return None if row is None else self._vectors[row].copy()

    def numbers(self) -> Numbers:
        """Return a copy of the numbers of all vectors."""
        return self._numbers[: len(self._rows)].copy()

    def vectors(self, numbers: Numbers) -> tuple[Numbers, Vectors]:
        """Return the given numbers that exist, and copies of their vectors."""
        here = [(number, row) for number in numbers.tolist() if (row := self._rows.get(number)) is not None]
        made = np.array(here, np.int64).reshape(-1, 2)
        return made[:, 0], self._vectors[made[:, 1]]

    def _resize(self, rows: int) -> None:
        used = len(self._rows)
        vectors, numbers = np.empty((rows, self.width), np.float32), np.empty(rows, np.int64)
        vectors[:used], numbers[:used] = self._vectors[:used], self._numbers[:used]
        self._vectors, self._numbers = vectors, numbers


class KeyIndex:
    """A `VectorIndex` that switches to sketches, or to a device if there is one, when it has many vectors."""

    def __init__(self, width: int, settings: IndexSettings) -> None:
        self.width = width
        self._settings = settings
        self._lock = threading.Lock()
        self._part: FlatIndex | SketchedIndex | DeviceIndex = FlatIndex(width)
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._part)

    @property
    def sketched(self) -> int:
        """Number of vectors with a sketch: all or none."""
        part = self._part
        return len(part) if isinstance(part, SketchedIndex) else 0

    @property
    def size_bytes(self) -> int:
        """Bytes of its vectors in memory."""
        return self._part.size_bytes

    def add(self, number: int, vector: Vectors) -> bool:
        """Add or replace a vector, and return whether its number is new. Raises LookupError after `close`."""
        with self._lock:
            self._check_open()
            is_new = self._part.add(number, vector)
            self._change_if_many()
        return is_new

    def add_all(self, numbers: Numbers, vectors: Vectors) -> int:
        """Add or replace many vectors, and return how many numbers are new. Raises LookupError after `close`."""
        with self._lock:
            self._check_open()
            replaced = sum(self._part.remove(number) for number in numbers.tolist())
            self._part.add_all(numbers, vectors)
            self._change_if_many()
        return len(numbers) - replaced

    def remove(self, number: int) -> bool:
        with self._lock:
            return self._part.remove(number)

    def search(self, vector: Vectors, count: int) -> list[Match]:
        """Return the most similar vectors. Waits some milliseconds for each change or other search."""
        with self._lock:
            return self._part.search(vector, count)

    def vector(self, number: int) -> Vectors | None:
        with self._lock:
            return self._part.vector(number)

    def numbers(self) -> Numbers:
        with self._lock:
            return self._part.numbers()

    def vectors(self, numbers: Numbers) -> Vectors:
        """Return the vectors of those numbers that exist, in any order."""
        with self._lock:
            return self._part.vectors(numbers)[1]

    def close_if_empty(self) -> bool:
        """Close the index if it has no vectors. Return whether it is closed."""
        with self._lock:
            self._closed = self._closed or len(self._part) == 0
            return self._closed

    def close(self) -> None:
        """Refuse new vectors from now on. May be called again."""
        with self._lock:
            self._closed = True

    def _change_if_many(self) -> None:
        """Switch to sketches or the device once, which takes a tenth of a second. There is no way back."""
        flat = self._part
        if not isinstance(flat, FlatIndex) or len(flat) < self._settings.flat_entries:
            return
        numbers, vectors = flat.vectors(flat.numbers())
        make = self._settings.make_device_index
        large = DeviceIndex(self.width, make) if make else SketchedIndex(vectors.mean(axis=0), self._settings)
        large.add_all(numbers, vectors)
        self._part = large

    def _check_open(self) -> None:
        if self._closed:
            raise LookupError("the index is closed")
