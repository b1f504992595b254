"""The index of one key: few vectors are all compared, of many the sketches are compared first."""

from __future__ import annotations

import threading

from bottega.cache.index.flat_index import FlatIndex
from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.sketched_index import SketchedIndex
from bottega.cache.index.vector_index import Match, Numbers, Vectors


class KeyIndex:
    """A `VectorIndex` that switches to sketches when it has many vectors.

    Args:
        width: Width of its vectors.
    """

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
        """Size of its vectors in memory."""
        return self._part.size_bytes

    def add(self, number: int, vector: Vectors) -> bool:
        """Add or replace a vector; return whether it is new. Raises LookupError after `close`."""
        with self._lock:
            self._check_open()
            is_new = self._part.add(number, vector)
            self._sketch_if_many()
        return is_new

    def add_all(self, numbers: Numbers, vectors: Vectors) -> int:
        """Add or replace many vectors; return how many are new. Raises LookupError after `close`."""
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
        """Return the most similar vectors. It waits for changes and other searches, some milliseconds each."""
        with self._lock:
            return self._part.search(vector, count)

    def vector(self, number: int) -> Vectors | None:
        with self._lock:
            return self._part.vector(number)

    def numbers(self) -> Numbers:
        with self._lock:
            return self._part.numbers()

    def vectors(self, numbers: Numbers) -> Vectors:
        """Return the vectors that exist, in any order."""
        with self._lock:
            return self._part.vectors(numbers)[1]

    def close_if_empty(self) -> bool:
        """Close the index if it has no vectors; return whether it is closed."""
        with self._lock:
            self._closed = self._closed or len(self._part) == 0
            return self._closed

    def close(self) -> None:
        """Accept no more vectors. It may be called again."""
        with self._lock:
            self._closed = True

    def _sketch_if_many(self) -> None:
        """Switch to sketches, once, which takes a tenth of a second. The sketches stay if vectors are removed again."""
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
