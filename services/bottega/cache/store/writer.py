"""The thread in which a store writes: recordings, evictions, deletions and uses.

Recordings that wait are bounded in number and bytes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from bottega.blobstore import BlobDisk, BlobWriter, RecordChanges
from bottega.cache.latent import Entry, EntryRecord
from bottega.cache.records import load_entries, read_parameters
from bottega.cache.store.contents import Contents
from bottega.cache.store.entry_table import Removal
from bottega.cache.store.insertion import Insertion
from bottega.cache.store.recording import CheckedRecording
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.statistics import CacheCounts, Dropped
from bottega.clocks import Clock
from bottega.errors import DataLoss, StorageUnavailable

# Maximum number of recordings that are written at once, and their maximum share of the budgets.
_MOST_AT_ONCE = 64
_SHARE_AT_ONCE = 0.5


class CacheWriter(BlobWriter):
    """The writer of a cache. Earlier entries are read in the background."""

    def __init__(
        self, settings: StoreSettings, *, contents: Contents, disk: BlobDisk, counts: CacheCounts, clock: Clock
    ) -> None:
        super().__init__(disk, name="the approximate cache", retry_s=settings.retry_s, loads_in_background=True)
        self._settings = settings
        self._contents = contents
        self._table = contents.table
        self._counts = counts
        self._lock = threading.Lock()
        self._waiting: deque[CheckedRecording] = deque()
        self._waiting_bytes = 0
        # Used by the writer's thread only.
        self._insertion = Insertion(settings, contents=contents, disk=disk, counts=counts, clock=clock)

    @property
    def waiting(self) -> tuple[int, int]:
        """Number of waiting recordings, and their bytes."""
        with self._lock:
            return len(self._waiting), self._waiting_bytes

    def record(self, recording: CheckedRecording) -> None:
        """Queue a recording to be written, or drop it."""
        reason = self._enqueue(recording)
        if reason is None:
            self._thread.post(self._write_waiting)
        else:
            self._counts.drop(reason)

    def lose(self, removal: Removal) -> None:
        """Remove damaged latents that the table has removed; their files are deleted in the background."""
        self._contents.forget(removal.entries)
        self._thread.post(lambda: self._disk.discard(removal.files))
        self._thread.post(self._tidy)

    def clear(self, model_hash: str) -> int:
        """Remove the entries of a model, or of all models for ""; return how many. Raises StorageUnavailable."""
        return self._thread.call(lambda: self._clear(model_hash))

    def parameters(self, entries: Sequence[Entry]) -> dict[int, bytes]:
        """Return the parameters of entries by number. Raises StorageUnavailable, DataLoss."""
        numbers = [entry.number for entry in entries]
        return self._thread.call(lambda: read_parameters(self._disk.records, numbers))

    def _enqueue(self, recording: CheckedRecording) -> Dropped | None:
        """Queue a recording, or return why it is dropped."""
        if self._trouble:
            return Dropped.TROUBLE
        if recording.file_bytes > self._settings.budget_bytes:
            return Dropped.TOO_LARGE
        with self._lock:
            size_bytes = self._waiting_bytes + recording.size_bytes
            if len(self._waiting) >= self._settings.max_waiting or size_bytes > self._settings.max_waiting_bytes:
                return Dropped.BUSY
            self._waiting.append(recording)
            self._waiting_bytes = size_bytes
        return None

    def _read(self) -> None:
        self._contents.forget(self._table.clear("").entries)
        self._table.take_changes()
        load_entries(self._disk, self._take)
        self._contents.loaded()
        self._insertion.make_room()

    def _take(self, key: str, records: Sequence[EntryRecord]) -> None:
        self._check_closing()
        self._contents.load(key, records)
        self._insertion.go_on_from(max(record.entry.number for record in records))

    def _take_changes(self) -> RecordChanges:
        return self._table.take_changes()

    def _write_waiting(self) -> None:
        while batch := self._next_batch():
            if self._trouble:
                self._counts.drop(Dropped.TROUBLE, len(batch))
                continue
            try:
                self._insertion.insert(batch)
            except (StorageUnavailable, DataLoss) as error:
                self._counts.drop(Dropped.TROUBLE, len(batch))
                self._fail(error)

    def _next_batch(self) -> list[CheckedRecording]:
        batch: list[CheckedRecording] = []
        left_bytes = _SHARE_AT_ONCE * self._settings.budget_bytes
        most = min(_MOST_AT_ONCE, max(1, int(_SHARE_AT_ONCE * self._settings.max_entries)))
        with self._lock:
            while self._waiting and len(batch) < most:
                left_bytes -= self._waiting[0].file_bytes
                if batch and left_bytes < 0:
                    break
                batch.append(self._waiting.popleft())
                self._waiting_bytes -= batch[-1].size_bytes
        return batch

    def _clear(self, model_hash: str) -> int:
        removal = self._table.clear(model_hash)
        self._contents.forget(removal.entries)
        self._disk.discard(removal.files)
        self._tidy()
        return len(removal.entries)
