"""One key's vectors: all in a flat part while they are few, else in lists around centres.

Centres are made in the background, beside the part that serves: no search ever waits for that. What changed meanwhile
is made good when the new part takes the old one's place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from bottega.cache.index.clustered_lists import ClusteredLists, TrainingStopped, centres_of, sample_size
from bottega.cache.index.flat_index import FlatIndex
from bottega.cache.index.settings import IndexSettings
from bottega.cache.index.vector_index import Match, Numbers, Vectors

# Vectors that are read at once, for which searches wait: a millisecond or two.
_BATCH = 512
# After a rebuild that failed, of which there was no memory for two parts, say.
_RETRY_S = 60.0


class ClusteredIndex:
    """A `VectorIndex`. width: of its vectors. on_due: called, in the thread of a change, when `rebuild` should be.

    `close` it; a rebuild that is under way then ends at its next round.
    """

    def __init__(self, width: int, settings: IndexSettings, *, on_due: Callable[[ClusteredIndex], None]) -> None:
        self.width = width
        self.rebuilds = 0
        self._settings = settings
        self._on_due = on_due
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._part: FlatIndex | ClusteredLists = FlatIndex(width)
        # Numbers that changed since a rebuild began; None while there is none.
        self._changed: set[int] | None = None
        self._announced = False
        self._not_before = 0.0
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._part)

    @property
    def listed(self) -> int:
        """Vectors in lists: all or none."""
        part = self._part
        return len(part) if isinstance(part, ClusteredLists) else 0

    @property
    def size_bytes(self) -> int:
        """Of its vectors; twice as much while it is rebuilt."""
        return self._part.size_bytes

    def add(self, number: int, vector: Vectors) -> bool:
        """Raises LookupError after `close`."""
        with self._lock:
            self._check_open()
            is_new = self._part.add(number, vector)
            self._note(number)
            due = self._newly_due()
        if due:
            self._on_due(self)
        return is_new

    def add_all(self, numbers: Numbers, vectors: Vectors) -> int:
        """Takes in many, and returns how many were new; nobody is told that a rebuild is due.

        Raises LookupError after `close`.
        """
        with self._lock:
            self._check_open()
            replaced = sum(self._part.remove(number) for number in numbers.tolist())
            self._part.add_all(numbers, vectors)
            self._note(*numbers.tolist())
        return len(numbers) - replaced

    def remove(self, number: int) -> bool:
        with self._lock:
            removed = self._part.remove(number)
            self._note(number)
            due = self._newly_due()
        if due:
            self._on_due(self)
        return removed

    def search(self, vector: Vectors, count: int) -> list[Match]:
        """It waits for changes and other searches, a millisecond or two each, and never for a rebuild."""
        with self._lock:
            return self._part.search(vector, count)

    def vector(self, number: int) -> Vectors | None:
        with self._lock:
            return self._part.vector(number)

    def numbers(self) -> Numbers:
        with self._lock:
            return self._part.numbers()

    def vectors(self, numbers: Numbers) -> Vectors:
        """Of those that are there, in no order."""
        with self._lock:
            return self._part.vectors(numbers)[1]

    def rebuild(self) -> None:
        """Where that is due, makes new centres, or a flat part for few vectors, and puts that in the old part's place.

        Where one is under way, it waits for that and looks again.
        """
        with self._building:
            try:
                while self._begin():
                    self._replace(self._made())
            except TrainingStopped:
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
            self._closed = self._closed or len(self._part) == 0
            return self._closed

    def close(self) -> None:
        """Ends a rebuild at its next round; nothing more is taken in. May be called again."""
        with self._lock:
            self._closed = True

    def _begin(self) -> bool:
        """Whether a rebuild is due; from here on, what changes is noted."""
        with self._lock:
            due = self._due()
            self._changed, self._announced = (set(), True) if due else (None, False)
            return due

    def _made(self) -> FlatIndex | ClusteredLists:
        """A part with everything that was there when it was begun, but for what changed. Raises TrainingStopped."""
        with self._lock:
            numbers = self._part.numbers()
        made: FlatIndex | ClusteredLists = FlatIndex(self.width)
        if len(numbers) >= self._settings.flat_entries:
            picked = np.random.default_rng(0).permutation(numbers)[: sample_size(len(numbers))]
            sample = np.concatenate([vectors for _, vectors in self._batches(picked)])
            threads = self._settings.build_threads
            centres = centres_of(sample, len(numbers), threads=threads, stopped=self._stopped)
            made = ClusteredLists(centres, self._settings, made_for=len(numbers))
        for here, vectors in self._batches(numbers):
            made.add_all(here, vectors)
        return made

    def _batches(self, numbers: Numbers) -> Iterator[tuple[Numbers, Vectors]]:
        """Those that are still there. Raises TrainingStopped."""
        for first in range(0, len(numbers), _BATCH):
            if self._stopped():
                raise TrainingStopped
            with self._lock:
                batch = self._part.vectors(numbers[first : first + _BATCH])
            yield batch

    def _replace(self, made: FlatIndex | ClusteredLists) -> None:
        """Puts the new part in the place of the old one, with what changed since it was begun."""
        with self._lock:
            changed, self._changed = self._changed or set(), None
            for number in changed:
                made.remove(number)
            numbers, vectors = self._part.vectors(np.array(sorted(changed), np.int64))
            made.add_all(numbers, vectors)
            self._part = made
            self.rebuilds += 1

    def _newly_due(self) -> bool:
        """Whether a rebuild is due that nobody was told of."""
        newly = not self._announced and self._due() and time.monotonic() >= self._not_before
        self._announced = self._announced or newly
        return newly

    def _due(self) -> bool:
        if self._closed:
            return False
        entries, part = len(self._part), self._part
        if isinstance(part, FlatIndex):
            return entries >= self._settings.flat_entries
        return not part.made_for / self._settings.growth < entries < part.made_for * self._settings.growth

    def _note(self, *numbers: int) -> None:
        if self._changed is not None:
            self._changed.update(numbers)

    def _stopped(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise LookupError("the index is closed")
