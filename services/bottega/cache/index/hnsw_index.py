"""One key's vectors: the recent ones in a flat part, the others in a graph that is replaced as a whole.

A graph is never changed while it is searched. What is added is searched one by one until there is enough of it for a
new graph: a copy of the old one with these added, or, where many nodes were deleted, one without those. It is made
beside the one that serves, so that no search ever waits for it; what changed meanwhile is made good when it takes its
place. Source: FreshDiskANN (Singh et al., 2021): a small index that changes beside a large one that does not, deletions
as a list, and a merge in the background.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from bottega.cache.index.flat_index import FlatIndex
from bottega.cache.index.hnsw_graph import Batches, BuildStopped, HnswGraph
from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import Match, Numbers, Vectors, best

# Vectors that go into a graph at once: more would be longer until a build can be stopped.
_BATCH = 4096
# After a build that failed, of which there was no memory for two graphs, say.
_RETRY_S = 60.0


class HnswIndex:
    """A `VectorIndex`. width: of its vectors. on_due: called, in the thread of a change, when `rebuild` should be.

    `close` it; a rebuild that is under way then ends at its next batch.
    """

    def __init__(self, width: int, settings: IndexSettings, *, on_due: Callable[[HnswIndex], None]) -> None:
        self.width = width
        self.rebuilds = 0
        self._settings = settings
        self._on_due = on_due
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._recent = FlatIndex(width)
        self._graph: HnswGraph | None = None
        # Numbers that were removed or replaced since a build began; None while there is none.
        self._changed: set[int] | None = None
        self._announced = False
        self._not_before = 0.0
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return self._entries()

    @property
    def graph_rows(self) -> tuple[int, int]:
        """Vectors in the graph, and those that were deleted from it."""
        graph = self._graph
        return (0, 0) if graph is None else (len(graph), graph.deleted)

    @property
    def size_bytes(self) -> int:
        """Of vectors and graph; twice as much while one is built."""
        graph = self._graph
        return self._recent.size_bytes + (0 if graph is None else graph.size_bytes)

    def add(self, number: int, vector: Vectors) -> bool:
        """Raises LookupError after `close`."""
        with self._lock:
            self._check_open()
            replaced = self._drop(number)
            self._recent.add(number, vector)
            due = self._newly_due()
        if due:
            self._on_due(self)
        return not replaced

    def add_all(self, numbers: Numbers, vectors: Vectors) -> int:
        """Takes in many, and returns how many were new; nobody is told that a rebuild is due.

        Raises LookupError after `close`.
        """
        with self._lock:
            self._check_open()
            replaced = sum(self._drop(number) for number in numbers.tolist())
            self._recent.add_all(numbers, vectors)
        return len(numbers) - replaced

    def remove(self, number: int) -> bool:
        with self._lock:
            removed = self._drop(number)
            due = self._newly_due()
        if due:
            self._on_due(self)
        return removed

    def search(self, vector: Vectors, count: int) -> list[Match]:
        """It waits for changes and other searches of the flat part, and never for a build."""
        with self._lock:
            graph = self._graph
            found = self._recent.search(vector, count)
        if graph is None:
            return found
        found += graph.search(vector, count)
        with self._lock:  # what was removed while the graph was searched is not found
            return best([match for match in found if self._has(match.number)], count)

    def vector(self, number: int) -> Vectors | None:
        with self._lock:
            vector = self._recent.vector(number)
            return vector if vector is not None or self._graph is None else self._graph.vector(number)

    def numbers(self) -> Numbers:
        with self._lock:
            recent, graph = self._recent.numbers(), self._graph
            return recent if graph is None else np.concatenate([recent, graph.numbers()])

    def vectors(self, numbers: Numbers) -> Vectors:
        """Of those that are there, in no order."""
        with self._lock:
            recent, graph = self._recent.vectors(numbers)[1], self._graph
        return recent if graph is None else np.concatenate([recent, graph.vectors(numbers)[1]])

    def rebuild(self) -> None:
        """Where that is due, makes a new graph and puts it in the place of the old one, or a flat part for few vectors.

        Takes a millisecond or so a vector. Where one is under way, it waits for that and looks again.
        """
        with self._building:
            try:
                while self._begin():
                    self._replace(*self._build())
            except BuildStopped:
                pass  # nobody wants it any more
            except BaseException:
                self._not_before = time.monotonic() + _RETRY_S
                raise
            finally:
                with self._lock:
                    self._changed, self._announced = None, False

    def close_if_empty(self) -> bool:
        """Closes it where it has no vectors. Whether it is closed."""
        with self._lock:
            self._closed = self._closed or self._entries() == 0
            return self._closed

    def close(self) -> None:
        """Ends a build at its next batch; nothing more is taken in. May be called again."""
        with self._lock:
            self._closed = True

    def _begin(self) -> bool:
        """Whether a build is due; from here on, what changes is noted."""
        with self._lock:
            due = self._due()
            self._changed, self._announced = (set(), True) if due else (None, False)
            return due

    def _build(self) -> tuple[FlatIndex | HnswGraph, Numbers]:
        """Everything in one part, and the numbers of the flat part's vectors that went into it. Raises BuildStopped."""
        with self._lock:
            recent, graph = self._recent.numbers(), self._graph
        batches = self._recent_batches(recent)
        if graph is not None and graph.deleted < self._settings.deleted_share * graph.rows:
            return graph.extended(batches, stopped=self._stopped), recent
        older: Batches = () if graph is None else graph.batches(_BATCH)
        both = (batch for part in (older, batches) for batch in part)
        if len(recent) + (0 if graph is None else len(graph)) >= self._settings.flat_entries:
            return HnswGraph.build(self.width, both, self._settings, stopped=self._stopped), recent
        flat = FlatIndex(self.width)
        for numbers, vectors in both:
            flat.add_all(numbers, vectors)
        return flat, recent

    def _recent_batches(self, numbers: Numbers) -> Batches:
        for first in range(0, len(numbers), _BATCH):
            with self._lock:
                batch = self._recent.vectors(numbers[first : first + _BATCH])
            yield batch

    def _replace(self, made: FlatIndex | HnswGraph, merged: Numbers) -> None:
        """Puts the new part in the place of the old ones, with what changed since the build began."""
        gone = set(merged.tolist())
        with self._lock:
            changed = self._changed or set()
            for number in changed:
                made.remove(number)
            left = [number for number in self._recent.numbers().tolist() if number not in gone or number in changed]
            numbers, vectors = self._recent.vectors(np.array(left, np.int64))
            self._graph, self._recent = (made, FlatIndex(self.width)) if isinstance(made, HnswGraph) else (None, made)
            self._recent.add_all(numbers, vectors)
            self._changed = None
            self.rebuilds += 1

    def _newly_due(self) -> bool:
        """Whether a build is due that nobody was told of."""
        newly = not self._announced and self._due() and time.monotonic() >= self._not_before
        self._announced = self._announced or newly
        return newly

    def _due(self) -> bool:
        if self._closed:
            return False
        if self._graph is None:
            return len(self._recent) >= self._settings.flat_entries
        many_recent = len(self._recent) >= self._settings.recent_entries
        return many_recent or self._graph.deleted >= self._settings.deleted_share * self._graph.rows

    def _drop(self, number: int) -> bool:
        """Takes a number out of where it is, and notes that. Whether it was anywhere."""
        dropped = self._recent.remove(number) or (self._graph is not None and self._graph.remove(number))
        if dropped and self._changed is not None:
            self._changed.add(number)
        return dropped

    def _has(self, number: int) -> bool:
        return number in self._recent or (self._graph is not None and number in self._graph)

    def _entries(self) -> int:
        return len(self._recent) + (0 if self._graph is None else len(self._graph))

    def _stopped(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise LookupError("the index is closed")
