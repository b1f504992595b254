"""The writing thread of a store, which survives a full or failing disk, and the store's counters.

Such a disk makes the store read-only: new items are dropped, stored ones are served, and writing is tried again every
`retry_s` seconds. At the start, the same thread reads the contents of the disk.
"""

from __future__ import annotations

import abc
import logging
import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

from bottega.blobstore.disk import BlobDisk
from bottega.blobstore.records import RecordChanges
from bottega.errors import DataLoss, StorageUnavailable
from bottega.storage import SerialThread

_log = logging.getLogger(__name__)


class StoreClosing(Exception):
    """An exception that stops reading records at the start, because the store is being closed."""


class BlobWriter(abc.ABC):
    """The base class of a store's writer. Start it with `start`, end it with `close`. Public methods are thread-safe.

    Args:
        name: The store's name in the log, such as "the activation store".
        retry_s: Seconds between tries to write to a failed disk, and maximum seconds until changes are written.
        loads_in_background: Whether `start` returns before all records are read.
    """

    def __init__(self, disk: BlobDisk, *, name: str, retry_s: float, loads_in_background: bool = False) -> None:
        self._disk = disk
        self._name = name
        self._loads_in_background = loads_in_background
        self._thread = SerialThread("store-writer", tick=self._tick, tick_s=retry_s)
        self._trouble = ""
        self._closing = False
        # Changed by the thread only.
        self._loaded = False

    @property
    def trouble(self) -> str:
        """Why nothing can be recorded now; empty if recording works."""
        return self._trouble

    @property
    def has_loaded(self) -> bool:
        """Whether all records have been read."""
        return self._loaded

    def start(self) -> None:
        """Lock the folder and read the disk. A failing disk is reported as `trouble` and tried again.

        Raises Unavailable if another process uses the folder, StorageUnavailable if it cannot be created, and
        ConfigError if its records belong to another program.
        """
        self._disk.lock()
        self._thread.call(self._open)
        if self._loads_in_background:
            self._thread.post(self._load_first)
        else:
            self._thread.call(self._load_first)

    def close(self) -> None:
        """Write the pending work, and stop. Do nothing if the thread was not started."""
        self._closing = True
        self._thread.post(self._tidy)
        if self._thread.end():
            self._disk.records.close()
        else:
            _log.error(f"the disk of {self._name} does not answer; pending writes are lost")
        self._disk.unlock()

    def flush(self, timeout_s: float) -> bool:
        """Wait until all work that was queued before is written. Return False after the time-out."""
        try:
            self._thread.call(self._tidy, wait_s=timeout_s)
        except StorageUnavailable:
            return False
        return self._loaded and not self._trouble

    # The methods below run in the thread.

    @abc.abstractmethod
    def _read(self) -> None:
        """Replace the store's contents in memory with the records on disk, which `BlobDisk.load` reads."""

    @abc.abstractmethod
    def _take_changes(self) -> RecordChanges:
        """Return and clear the changes that remain to be written."""

    def _probe(self) -> None:
        """Test that the disk can be written. Raise StorageUnavailable if not."""
        self._disk.files.probe()

    def _tick(self) -> None:
        if self._trouble:
            self._heal()
        else:
            self._tidy()

    def _open(self) -> None:
        self._attempt(self._disk.open)

    def _load_first(self) -> None:
        if not self._loaded and not self._trouble:  # after trouble, the first successful attempt has loaded
            self._load()

    def _load(self) -> None:
        try:
            read = self._attempt(self._read)
        except StoreClosing:
            return
        if read:
            self._loaded = True
            _log.info(f"{self._name} has read its records from disk")
            if self._attempt(self._probe):
                self._tidy()

    def _check_closing(self) -> None:
        """Raise StoreClosing if the store is being closed. A long `_read` calls it now and then."""
        if self._closing:
            raise StoreClosing

    def _tidy(self) -> None:
        if self._loaded:
            self._attempt(lambda: self._disk.tidy(self._take_changes()))

    def _attempt(self, step: Callable[[], object]) -> bool:
        """Run a step that uses the disk, and return whether it succeeded. A failure makes the store read-only."""
        try:
            step()
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return False
        return True

    def _fail(self, error: StorageUnavailable | DataLoss) -> None:
        if isinstance(error, DataLoss):
            self._loaded = False  # the records have to be opened and read again
        if not self._trouble:
            _log.error(f"{self._name} records nothing until its disk can be written", extra={"text": error.message})
        self._trouble = error.message

    def _heal(self) -> None:
        """Try the disk again. If the records failed or are missing, read the folder again."""
        try:
            self._loaded = self._disk.open() and self._loaded
            self._probe()
            if self._loaded:
                self._disk.tidy(self._take_changes())
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return
        self._trouble = ""
        _log.info(f"the disk of {self._name} can be written again")
        if not self._loaded:
            self._load()


ReasonT = TypeVar("ReasonT", bound=StrEnum)


class StoreCounts(Generic[ReasonT]):
    """Thread-safe counters: totals by name, and dropped items by reason.

    Args:
        reasons: The reasons for dropping an item; each count starts at 0.
    """

    def __init__(self, reasons: type[ReasonT]) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter({reason.value: 0 for reason in reasons})

    def add(self, name: str, number: int = 1) -> None:
        """Increase a total."""
        with self._lock:
            self._totals[name] += number

    def total(self, name: str) -> int:
        """Return a total; 0 if nothing was counted."""
        return self._totals[name]

    def drop(self, reason: ReasonT, number: int = 1) -> None:
        """Count dropped items, by reason."""
        with self._lock:
            self._dropped[reason.value] += number

    def dropped(self) -> dict[str, int]:
        """Return the numbers of dropped items, by reason."""
        with self._lock:
            return dict(self._dropped)
