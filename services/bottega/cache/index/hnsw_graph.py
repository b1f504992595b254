"""A graph of vectors (HNSW, Malkov and Yashunin, TPAMI 2020) that takes no more of them once it is made.

FAISS's graph can neither be changed while it is searched nor lose a node (its issue 3339). So one that is searched
stays as it is: a node is deleted by a bit that keeps it out of results, while searches still pass through it, and nodes
are added to a copy. Vectors are in half precision, which takes half of the memory and half of the time of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import faiss
import numpy as np
from numpy.typing import NDArray

from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import Match, Numbers, Vectors

_NOBODY = -1

Batches = Iterable[tuple[Numbers, Vectors]]


class BuildStopped(Exception):
    """A graph is no longer wanted."""


class HnswGraph:
    """Any number of threads may search it, while one deletes. Make it with `build`.

    index: FAISS's, which nobody else changes. numbers: of its rows, at least 0; those of deleted ones are -1.
    """

    def __init__(self, index: faiss.Index, numbers: Numbers, settings: IndexSettings) -> None:
        self._index = index
        self._settings = settings
        self._numbers = numbers
        self._order = np.argsort(numbers, kind="stable")
        self._sorted = numbers[self._order]
        alive = numbers != _NOBODY
        self._alive: NDArray[np.uint8] = np.packbits(alive, bitorder="little")
        self._deleted = len(numbers) - int(np.count_nonzero(alive))
        # FAISS's own types know neither this class nor what its constructors take in Python.
        self._parameters: faiss.SearchParameters = faiss.SearchParametersHNSW(  # type: ignore[attr-defined]
            efSearch=settings.search_width,
            sel=faiss.IDSelectorBitmap(self._alive),  # type: ignore[arg-type, call-arg]
        )

    @classmethod
    def build(cls, width: int, batches: Batches, settings: IndexSettings, *, stopped: Callable[[], bool]) -> HnswGraph:
        """A graph of these vectors. stopped: asked after each batch. Raises BuildStopped."""
        # FAISS's own types say otherwise: this takes the number of an element type.
        index = faiss.IndexHNSWSQ(width, faiss.ScalarQuantizer.QT_fp16, settings.links, faiss.METRIC_INNER_PRODUCT)  # type: ignore[arg-type]
        index.hnsw.efConstruction = settings.build_width
        return cls(index, _fill(index, batches, settings.build_threads, stopped), settings)

    def extended(self, batches: Batches, *, stopped: Callable[[], bool]) -> HnswGraph:
        """A copy with further vectors. Raises BuildStopped."""
        kept = np.where(self._alive_rows(), self._numbers, _NOBODY)
        index = faiss.clone_index(self._index)
        added = _fill(index, batches, self._settings.build_threads, stopped)
        return HnswGraph(index, np.concatenate([kept, added]), self._settings)

    def __len__(self) -> int:
        return len(self._numbers) - self._deleted

    @property
    def rows(self) -> int:
        """With those that were deleted."""
        return len(self._numbers)

    @property
    def deleted(self) -> int:
        """Rows that were deleted."""
        return self._deleted

    @property
    def size_bytes(self) -> int:
        """Of vectors, links and numbers, nearly."""
        # A node in h layers has 2 M links in the lowest and M in each other one; there are few of these.
        links = 2 * self._settings.links * 4
        return self.rows * (2 * self._index.d + links + 3 * 8) + self._alive.nbytes

    def remove(self, number: int) -> bool:
        """Keeps it out of results. Whether it was there. One thread at a time."""
        row = self._row(number)
        if row is None:
            return False
        self._alive[row >> 3] &= np.uint8(0xFF ^ (1 << (row & 7)))
        self._deleted += 1
        return True

    def search(self, vector: Vectors, count: int) -> list[Match]:
        """Up to so many of the most similar, the most similar first."""
        similarities, rows = self._index.search(vector[None], count, params=self._parameters)
        return [
            Match(number=int(self._numbers[row]), similarity=min(float(similarity), 1.0))
            for similarity, row in zip(similarities[0], rows[0], strict=True)
            if row >= 0
        ]

    def __contains__(self, number: int) -> bool:
        return self._row(number) is not None

    def vector(self, number: int) -> Vectors | None:
        """The vector with that number, if it is there."""
        row = self._row(number)
        return None if row is None else self._index.reconstruct_batch(np.array([row], np.int64))[0]

    def numbers(self) -> Numbers:
        """Of all vectors, in the order in which they came."""
        return self._numbers[self._alive_rows()]

    def vectors(self, numbers: Numbers) -> tuple[Numbers, Vectors]:
        """Those of the numbers that are there, and their vectors."""
        rows = self._rows(numbers)
        here = rows >= 0
        return numbers[here], self._index.reconstruct_batch(rows[here])

    def batches(self, size: int) -> Batches:
        """All vectors, so many at a time; what is deleted meanwhile may be among them."""
        numbers = self.numbers()
        for first in range(0, len(numbers), size):
            yield self.vectors(numbers[first : first + size])

    def _row(self, number: int) -> int | None:
        """Of a vector that is there."""
        row = int(self._rows(np.array([number], np.int64))[0])
        return None if row < 0 else row

    def _rows(self, numbers: Numbers) -> Numbers:
        """Of vectors, -1 for those that are not there."""
        places = np.minimum(np.searchsorted(self._sorted, numbers), len(self._sorted) - 1)
        rows = self._order[places]
        here = (self._sorted[places] == numbers) & (self._alive[rows >> 3] >> (rows & 7).astype(np.uint8) & 1 == 1)
        return np.where(here, rows, -1)

    def _alive_rows(self) -> NDArray[np.bool_]:
        return np.unpackbits(self._alive, count=len(self._numbers), bitorder="little").astype(np.bool_)


def _fill(index: faiss.Index, batches: Batches, threads: int, stopped: Callable[[], bool]) -> Numbers:
    """Adds them, and returns the numbers of the rows that were added."""
    added: list[Numbers] = []
    threads_before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)  # of this thread alone
    try:
        for numbers, vectors in batches:
            if stopped():
                raise BuildStopped
            if len(numbers):
                index.add(vectors)
                added.append(numbers)
    finally:
        faiss.omp_set_num_threads(threads_before)
    return np.concatenate(added) if added else np.empty(0, np.int64)
