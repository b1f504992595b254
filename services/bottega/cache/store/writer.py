"""The thread in which a store writes: recordings, evictions, deletions and uses. It also reads earlier entries.

A disk that is full or fails makes the store read-only: recordings are dropped, existing entries are served, and the
disk is tried again every `retry_s` seconds. Recordings that wait are bounded in number and bytes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from bottega.cache.disk.disk import CacheDisk
from bottega.cache.latent import Entry, EntryRecord
from bottega.cache.store.contents import Contents
from bottega.cache.store.entry_table import Removal
from bottega.cache.store.insertion import Insertion
from bottega.cache.store.recording import CheckedRecording
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.statistics import Counts, Dropped
from bottega.clocks import Clock
from bottega.errors import DataLoss, StorageUnavailable
from bottega.storage.store_thread import StoreThread

# Maximum number of recordings that are written at once, and their maximum share of the budgets.
_MOST_AT_ONCE = 64
_SHARE_AT_ONCE = 0.5

_log = logging.getLogger(__name__)


class _Closing(Exception):
    """Stops the reading of earlier entries."""


class CacheWriter:
    """The writer of a store. Start it with `start`, end it with `close`. Any thread may call it."""

    def __init__(
        self, settings: StoreSettings, *, contents: Contents, disk: CacheDisk, counts: Counts, clock: Clock
    ) -> None:
        self._settings = settings
        self._contents = contents
        self._table = contents.table
        self._disk = disk
        self._counts = counts
        self._thread = StoreThread("cache-writer", tick=self._tick, every_s=settings.retry_s)
        self._lock = threading.Lock()
        self._waiting: deque[CheckedRecording] = deque()
        self._waiting_bytes = 0
        self._trouble = ""
        self._closing = False
        # Used by the writer's thread only.
        self._insertion = Insertion(settings, contents=contents, disk=disk, counts=counts, clock=clock)
        self._opened = self._loaded = False

    @property
    def trouble(self) -> str:
        """Why nothing can be recorded now; "" if all is well."""
        return self._trouble

    @property
    def has_read(self) -> bool:
        """Whether all earlier entries have been read. Before that, an unknown entry may still exist."""
        return self._loaded

    @property
    def waiting(self) -> tuple[int, int]:
        """Number of waiting recordings, and their bytes."""
        with self._lock:
            return len(self._waiting), self._waiting_bytes

    def start(self) -> None:
        """Open the records and read them in the background. Raises ConfigError if they are not ours."""
        self._thread.start()
        self._thread.call(self._open)
        self._thread.post(self._load)

    def close(self) -> None:
        """Write what waits and stop."""
        self._closing = True
        self._thread.post(self._tidy)
        if self._thread.end():
            self._disk.records.close()
        else:
            _log.error("the disk of the cache does not answer; what waits for it is lost")

    def flush(self, timeout_s: float) -> bool:
        """Return whether everything handed in before was written within that time."""
        try:
            self._thread.call(self._tidy, wait_s=timeout_s)
        except StorageUnavailable:
            return False
        return self._loaded and not self._trouble

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
        return self._thread.call(lambda: self._disk.records.parameters(numbers))

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

    def _tick(self) -> None:
        if self._trouble:
            self._heal()
        else:
            self._tidy()

    def _open(self) -> None:
        """Open the records. Raises ConfigError."""
        try:
            self._disk.open()
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
        else:
            self._opened = True

    def _load(self) -> None:
        if self._loaded or not self._opened:
            return
        try:
            self._disk.load(self._take)
        except _Closing:
            return
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return
        self._loaded = True
        self._contents.loaded()
        _log.info("the cache has read its entries", extra={"entries": len(self._table)})
        self._insertion.make_room()
        self._tidy(probe=True)

    def _take(self, key: str, records: Sequence[EntryRecord]) -> None:
        if self._closing:
            raise _Closing
        self._contents.load(key, records)
        self._insertion.go_on_from(max(record.entry.number for record in records))

    def _tidy(self, *, probe: bool = False) -> None:
        """Write pending deletions and changes.

        Args:
            probe: Also test whether the disk can be written.
        """
        if not self._opened:
            return
        try:
            if probe:
                self._disk.files.probe()
            self._disk.tidy(self._table.take_changes())
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)

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

    def _fail(self, error: StorageUnavailable | DataLoss) -> None:
        if isinstance(error, DataLoss):
            self._loaded = False  # the records have to be opened and read again
        if not self._trouble:
            _log.error("the cache records nothing until its disk can be written", extra={"text": error.message})
        self._trouble = error.message

    def _heal(self) -> None:
        """Try the disk again. If the records have failed or are gone, read what is there now."""
        try:
            self._loaded = self._disk.open() and self._loaded
            self._disk.files.probe()
            if self._loaded:
                self._disk.tidy(self._table.take_changes())
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return
        self._trouble = ""
        _log.info("the disk of the cache can be written again")
        if not self._loaded:
            self._contents.forget(self._table.clear("").entries)
            self._table.take_changes()
            self._opened = True
            self._load()
