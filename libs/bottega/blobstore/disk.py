"""The files and records of a store on disk, with the pending deletions and changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bottega.blobstore.records import BlobRecords, NewRows, RecordChanges, RecordSchema, StoredRecord, Values
from bottega.errors import Unavailable
from bottega.storage import BlobFiles, folders, os_errors
from bottega.storage.process_lock import HeldElsewhere, ProcessLock

# Shared values that no part uses any more are deleted after this many parts and records were removed or replaced.
_STRAYS_AFTER = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The valid content of a record that was read at the start: its files, and the parts whose file is missing."""

    files: Iterable[str] = ()
    """Names of the record's files to keep; empty if the record is useless and is to be deleted."""
    missing: Iterable[Values] = ()
    """Keys of parts whose file is missing."""


class BlobDisk:
    """The files and records of a store in one folder, which only one process uses at a time.

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
        """Create the folder and lock it. Raise Unavailable if another process uses it, or StorageUnavailable."""
        with os_errors.translated():
            folders.make_own(self._folder)
            try:
                self._lock.acquire()
            except HeldElsewhere as held:
                raise Unavailable(f"{held} (key folder)") from None

    def unlock(self) -> None:
        """Unlock the folder for other processes. Do nothing if it is not locked."""
        self._lock.release()

    def open(self) -> bool:
        """Open the records, for the first time or again. Return whether records and files are the same as before.

        Raises ConfigError if the records belong to another program.
        """
        was_in_place = self.records.in_place and self.files.in_place
        return self.records.open() and was_in_place

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
