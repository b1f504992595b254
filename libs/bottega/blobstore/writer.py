"""The disk of a store, and its writing thread, which survives a full or failing disk and has the store's counters.

Such a disk makes the store read-only: new items are dropped, stored ones are served, and writing is tried again every
`retry_s` seconds. At the start, the same thread reads the contents of the disk.
"""

from __future__ import annotations

import abc
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from bottega.blobstore.records import BlobRecords, NewRows, RecordChanges, RecordSchema, StoredRecord, Values
from bottega.errors import DataLoss, StorageUnavailable, Unavailable
from bottega.storage import BlobFiles, SerialThread, folders, os_errors
from bottega.storage.folders import HeldElsewhere, ProcessLock

# Shared values that no part uses any more are deleted after this many parts and records were removed or replaced.
_STRAYS_AFTER = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The valid content of a record that was read at the start: its files, and the parts whose file is missing."""

    files: Iterable[str] = ()
    """Names of the record's files to keep; empty if the record is useless and is to be deleted."""
    missing: Iterable[Values] = ()
    """Keys of parts whose file is missing."""


class StoreDisk(Protocol):
    """The files and records of a store, as its writer uses them in its thread.

    Calls wait, and raise StorageUnavailable, or DataLoss for damaged records, after which they can be repeated.
    """

    def lock(self) -> None:
        """Keep other processes out. Raise Unavailable if another one uses the folder, or StorageUnavailable."""

    def unlock(self) -> None:
        """Let other processes in. Do nothing if nothing is locked."""

    def open(self) -> bool:
        """Open the records, for the first time or again. Return whether records and files are the same as before.

        Raises ConfigError if the records belong to another program.
        """
        ...

    def probe(self) -> None:
        """Write and remove a file, as a test."""

    def tidy(self, changes: RecordChanges) -> None:
        """Execute the pending deletions, and write the changes."""

    def close(self) -> None:
        """Close the records."""


class BlobDisk:
    """The files and records of a store in one folder, which only one process uses at a time; a StoreDisk.

    One thread at a time calls it; other threads may read `files` meanwhile. Calls wait for the disk and raise
    StorageUnavailable, or DataLoss for damaged records, after which they can be repeated.

    Args:
        folder: Contains the records, and the folder of files.
        files: Name of the folder of files.
        names: Matches a file's whole name; see BlobFiles.
        min_free_bytes: Bytes of disk space to leave to other programs. A value above 5 % of the disk counts as 5 %.
    """

    def __init__(
        self, folder: Path, *, files: str, names: re.Pattern[str], schema: RecordSchema, min_free_bytes: int = 0
    ) -> None:
        self.files = BlobFiles(folder / files, names=names, min_free_bytes=min_free_bytes)
        self.records = BlobRecords(folder / "records.db", schema)
        self._folder = folder
        self._lock = ProcessLock(folder)
        self._changes = RecordChanges()
        self._garbage: list[str] = []
        # Deleted and replaced rows since strays were last deleted.
        self._removed = 0

    def lock(self) -> None:
        lock_folder(self._folder, self._lock)

    def unlock(self) -> None:
        """Unlock the folder for other processes. Do nothing if it is not locked."""
        self._lock.release()

    def open(self) -> bool:
        """Open the records, for the first time or again. Return whether records and files are the same as before.

        Raises ConfigError if the records belong to another program.
        """
        was_in_place = self.records.in_place and self.files.in_place
        return self.records.open() and was_in_place

    def probe(self) -> None:
        self.files.probe()

    def close(self) -> None:
        self.records.close()

    def load(self, complete: Callable[[StoredRecord, set[str]], Completion], *, suffix: str = "") -> None:
        """Pass each record to `complete`, with the names of existing files. The next `tidy` deletes everything else.

        Args:
            suffix: See BlobRecords.read.
        """
        self._changes, self._garbage = RecordChanges(), []
        names = self.files.open()
        found = RecordChanges()

        def take(stored: StoredRecord) -> None:
            done = complete(stored, names)
            files = set(done.files)
            if files:
                found.gone_parts.update(done.missing)
                names.difference_update(files)
            else:
                found.gone.add(stored.row.key[0])

        damaged = self.records.read(take, suffix=suffix)
        self._removed = _STRAYS_AFTER if damaged or self.records.shares_values else 0
        self._changes.add(damaged)
        self._changes.add(found)
        self._garbage += names

    def discard(self, names: Iterable[str]) -> None:
        """Delete these files with the next `tidy`."""
        self._garbage += names

    def tidy(self, changes: RecordChanges) -> None:
        """Execute the pending deletions, and write the changes."""
        self.make_room()
        self.write(changes)
        if self._removed >= _STRAYS_AFTER:
            self.records.drop_strays()
            self._removed = 0

    def make_room(self) -> None:
        """Delete the discarded files now, to free space."""
        while self._garbage:
            self.files.remove(self._garbage[-1:])
            self._garbage.pop()

    def write(self, changes: RecordChanges, new: NewRows | None = None) -> None:
        """Write changes and new rows in one transaction. The files of the new rows must exist."""
        new = new or NewRows()
        self._changes.add(changes)
        if new or self._changes:
            self.records.write(self._changes, new)
            if self.records.shares_values:
                self._removed += len(self._changes.gone) + len(self._changes.gone_parts) + len(new.parts)
            self._changes = RecordChanges()


def lock_folder(folder: Path, lock: ProcessLock) -> None:
    """Create a store's folder and lock it. Raise Unavailable if another process uses it, or StorageUnavailable."""
    with os_errors.translated():
        folders.make_own(folder)
        try:
            lock.acquire()
        except HeldElsewhere as held:
            raise Unavailable(f"{held} (key folder)") from None


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

    def __init__(self, disk: StoreDisk, *, name: str, retry_s: float, loads_in_background: bool = False) -> None:
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
            self._disk.close()
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
        """Test that items can be written. Raise StorageUnavailable if not."""
        self._disk.probe()

    def _tick(self) -> None:
        if self._trouble:
            self._heal()
        else:
            self._tidy()

    def _open(self) -> None:
        self._attempt(self._disk.open)

    def _load_first(self) -> None:
        if self._loaded or self._trouble:  # after trouble, the first successful attempt has loaded
            return
        try:
            if self._attempt(self._load) and self._attempt(self._probe):
                self._tidy()
        except StoreClosing:
            return

    def _load(self) -> None:
        self._read()
        self._loaded = True
        _log.info(f"{self._name} has read its records")

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
            _log.error(f"{self._name} records nothing until it can write again", extra={"text": error.message})
        self._trouble = error.message

    def _heal(self) -> None:
        """Try to write again. If the records failed or are missing, read the folder again."""
        try:
            self._loaded = self._disk.open() and self._loaded
            self._probe()
            if not self._loaded:
                self._load()
            self._disk.tidy(self._take_changes())
        except (StorageUnavailable, DataLoss) as error:
            self._fail(error)
            return
        except StoreClosing:
            return
        self._trouble = ""
        _log.info(f"{self._name} can write again")


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
