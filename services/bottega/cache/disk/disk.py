"""A store's files and records on the disk, with the pending deletions and changes.

Files are written before their records and deleted before them. An interruption leaves files without a record, which the
next start deletes, or a record without files, which is a miss. One thread at a time calls it. Its calls wait for the
disk and raise StorageUnavailable, or DataLoss for damaged records, after which they can be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from bottega.cache.disk.latent_files import LatentFiles, latent_name, picture_name
from bottega.cache.disk.records import CacheRecords, Changes
from bottega.cache.latent import EntryRecord


@dataclass(slots=True, kw_only=True)
class CacheDisk:
    """The disk of a store. Other threads may read `files` meanwhile."""

    files: LatentFiles
    records: CacheRecords
    _changes: Changes = field(default_factory=Changes)
    _garbage: list[str] = field(default_factory=list)
    _strays: bool = False

    def open(self) -> bool:
        """Open the records, again or for the first time; return whether they and the files are the same as before."""
        was_in_place = self.records.in_place and self.files.in_place
        return self.records.open() and was_in_place

    def load(self, take: Callable[[str, Sequence[EntryRecord]], None]) -> None:
        """Pass all entries to `take`, some thousands of a key at a time. The next `tidy` deletes damaged ones."""
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
        """Delete these files with the next `tidy`."""
        self._garbage += names

    def tidy(self, changes: Changes) -> None:
        """Execute the pending deletions, and write the changes."""
        self.make_room()
        self.add((), changes)

    def make_room(self) -> None:
        """Delete the pending files, which frees room for others."""
        while self._garbage:
            self.files.remove(self._garbage[-1:])
            self._garbage.pop()

    def add(self, records: Collection[EntryRecord], changes: Changes) -> None:
        """Write records of entries whose files exist, and all changes, or nothing at all."""
        self._changes.add(changes)
        if self._strays:
            self.records.drop_strays()
            self._strays = False
        if records or self._changes:
            self.records.write(records, self._changes)
            self._changes = Changes()

    def _complete(self, record: EntryRecord, names: set[str]) -> EntryRecord:
        """Return the record with the latents whose files exist.

        Args:
            names: Names of all files; those of the record are removed.
        """
        entry = record.entry
        latents = {step: latent for step, latent in record.latents.items() if latent_name(entry.name, step) in names}
        if not latents:
            self._changes.entries.add(entry.number)
            return replace(record, latents={})
        self._changes.latents |= {(entry.number, step) for step in record.latents.keys() - latents.keys()}
        names.difference_update({picture_name(entry.name), *(latent_name(entry.name, step) for step in latents)})
        return replace(record, latents=latents)
