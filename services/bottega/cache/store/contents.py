"""The in-memory state of a store: entry table, embedding index, recent pictures by prompt, and match predictor.

They change together, so that an entry in the table is also in the index. Any thread may call it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from bottega.cache.index import EntryIndex
from bottega.cache.latent import Entry, EntryRecord
from bottega.cache.predictor import MatchPredictor
from bottega.cache.store.entry_table import EntryTable
from bottega.cache.store.selector import PromptRows


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
        """Finish loading, after all stored entries were added."""
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
