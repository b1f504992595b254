"""What a store has on the disk, files and records, and what is still to be deleted and noted there.

Files come before their records and go before them: whatever interrupts that leaves files without a record, which the
next start deletes, or a record without files, which is a miss. One thread at a time calls it; its calls wait for the
disk and raise StorageUnavailable, or DataLoss for damaged records. After that they can be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from bottega.cache.disk.latent_files import LatentFiles, latent_name, picture_name
from bottega.cache.disk.records import CacheRecords, Changes
from bottega.cache.latent import EntryRecord


@dataclass(slots=True, kw_only=True)
class CacheDisk:
    """files may be read by others meanwhile."""

    files: LatentFiles
    records: CacheRecords
    _changes: Changes = field(default_factory=Changes)
    _garbage: list[str] = field(default_factory=list)
    _strays: bool = False

    def open(self) -> bool:
        """Opens the records, again or for the first time. Whether what is there is what was there."""
        was_in_place = self.records.in_place and self.files.in_place
        return self.records.open() and was_in_place

    def load(self, take: Callable[[str, Sequence[EntryRecord]], None]) -> None:
        """Gives all entries to `take`, some thousands of a key at a time. What is damaged goes with `tidy`."""
        self._changes, self._garbage = Changes(), []
        names = self.files.open()

        def complete(key: str, records: list[EntryRecord]) -> None:
            found = [self._complete(record, names) for record in records]
            sound = [record for record in found if record.latents]
            if sound:
                take(key, sound)

        damaged = self.records.read(complete)
        self._changes.entries.update(damaged)
        self._strays = bool(damaged)
        self._garbage += names

    def discard(self, names: Iterable[str]) -> None:
        """These files are deleted with the next `tidy`."""
        self._garbage += names

    def tidy(self, changes: Changes) -> None:
        """Deletes what is to be deleted, and notes what changed."""
        self.make_room()
        self.add((), changes)

    def make_room(self) -> None:
        """Deletes what is to be deleted of the files, so that others have room."""
        while self._garbage:
            self.files.remove(self._garbage[-1:])
            self._garbage.pop()

    def add(self, records: Collection[EntryRecord], changes: Changes) -> None:
        """Notes entries whose files are there, and what else changed: all of it or nothing."""
        self._changes.add(changes)
        if self._strays:
            self.records.drop_strays()
            self._strays = False
        if records or self._changes:
            self.records.write(records, self._changes)
            self._changes = Changes()

    def _complete(self, record: EntryRecord, names: set[str]) -> EntryRecord:
        """The record with those latents whose files are there. names: of all files; those of the record are taken."""
        entry = record.entry
        latents = {step: latent for step, latent in record.latents.items() if latent_name(entry.name, step) in names}
        if not latents:
            self._changes.entries.add(entry.number)
            return replace(record, latents={})
        self._changes.latents |= {(entry.number, step) for step in record.latents.keys() - latents.keys()}
        names.difference_update({picture_name(entry.name), *(latent_name(entry.name, step) for step in latents)})
        return replace(record, latents=latents)
