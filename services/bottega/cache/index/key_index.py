"""The index of one key. With few vectors, a search compares all of them; with many, it compares sketches first.

In the exact index, adding or removing a vector takes no longer than copying one vector.
"""

from __future__ import annotations

import threading

import faiss
import numpy as np

from bottega.cache.index.sketched_index import SketchedIndex
from bottega.cache.index.vector_index import IndexSettings, Match, Numbers, Vectors

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
    """A `VectorIndex` that switches to sketches when it has many vectors."""

    def __init__(self, width: int, settings: IndexSettings) -> None:
        self.width = width
        self._settings = settings
        self._lock = threading.Lock()
        self._part: FlatIndex | SketchedIndex = FlatIndex(width)
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
            self._sketch_if_many()
        return is_new

    def add_all(self, numbers: Numbers, vectors: Vectors) -> int:
        """Add or replace many vectors, and return how many numbers are new. Raises LookupError after `close`."""
        with self._lock:
            self._check_open()
            replaced = sum(self._part.remove(number) for number in numbers.tolist())
            self._part.add_all(numbers, vectors)
            self._sketch_if_many()
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

    def _sketch_if_many(self) -> None:
        """Switch to sketches once, which takes a tenth of a second. There is no way back when vectors are removed."""
        flat = self._part
        if isinstance(flat, SketchedIndex) or len(flat) < self._settings.flat_entries:
            return
        numbers, vectors = flat.vectors(flat.numbers())
        sketched = SketchedIndex(vectors.mean(axis=0), self._settings)
        sketched.add_all(numbers, vectors)
        self._part = sketched

    def _check_open(self) -> None:
        if self._closed:
            raise LookupError("the index is closed")
