"""Turns recordings into entries: it evicts to make room, writes files, then records, and then serves the entries.

One thread at a time calls it. It knows no queue: if it raises, none of the recordings was kept.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from bottega.blobstore import BlobDisk
from bottega.cache.latent import Entry, EntryPicture, EntryRecord, KeptLatent
from bottega.cache.records import latent_name, new_rows, noise_of, picture_name
from bottega.cache.store.contents import Contents
from bottega.cache.store.entry_table import new_usage
from bottega.cache.store.recording import CheckedRecording
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.statistics import CacheCounts, Dropped
from bottega.clocks import Clock
from bottega.errors import DataLoss, QueueFull, StorageUnavailable


class Insertion:
    """Inserts recordings and numbers the entries.

    Args:
        clock: Tells when they were recorded.
    """

    def __init__(
        self, settings: StoreSettings, *, contents: Contents, disk: BlobDisk, counts: CacheCounts, clock: Clock
    ) -> None:
        self._settings = settings
        self._contents = contents
        self._disk = disk
        self._counts = counts
        self._clock = clock
        self._next_number = 1

    def go_on_from(self, number: int) -> None:
        """Continue the numbering after this number."""
        self._next_number = max(self._next_number, number + 1)

    def insert(self, recordings: Sequence[CheckedRecording]) -> None:
        """Keep all recordings or none, except that one which the index refuses is dropped alone.

        Raises StorageUnavailable, DataLoss.
        """
        self.make_room(recordings)
        self._disk.make_room()
        written: list[EntryRecord] = []
        try:
            for recording in recordings:
                record = self._prepare(recording)
                if record is not None:
                    written.append(record)
                    self._write_files(recording, record)
            self._disk.write(self._contents.table.take_changes(), new_rows(written))
        except (StorageUnavailable, DataLoss):
            for record in written:
                self._contents.take_back(record)
                self._disk.discard(_files_of(record))
            raise
        for record in written:
            self._contents.add(record)
        self._counts.add("recorded", len(written))

    def make_room(self, recordings: Sequence[CheckedRecording] = ()) -> None:
        """Evict until the recordings fit into the budgets. If anything is evicted, some spare room is made, too."""
        table, settings = self._contents.table, self._settings
        room_bytes = settings.budget_bytes - sum(recording.file_bytes for recording in recordings)
        room_entries = settings.max_entries - len(recordings)
        if table.size_bytes <= room_bytes and len(table) <= room_entries:
            return
        if table.size_bytes > room_bytes:
            room_bytes -= self._spare_bytes(recordings)
        removal = table.evict(room_bytes, room_entries)
        self._contents.forget(removal.entries)
        self._disk.discard(removal.files)
        self._counts.add("evictions", removal.latents)

    def _spare_bytes(self, recordings: Sequence[CheckedRecording]) -> int:
        """Return the spare room in whole latents. With a budget for only a few latents, it is 0."""
        spare_bytes = int(self._settings.batch_share * self._settings.budget_bytes)
        latent_bytes = max((recording.each_bytes for recording in recordings), default=1)
        return spare_bytes - spare_bytes % latent_bytes

    def _prepare(self, recording: CheckedRecording) -> EntryRecord | None:
        """Add the recording to the index and return its record; None if the index refuses it."""
        record = _to_record(recording, self._next_number, now=self._clock.wall(), asked=self._contents.table.now)
        self._next_number += 1
        try:
            self._contents.prepare(record)
        except (QueueFull, ValueError):
            self._counts.drop(Dropped.UNFIT)
            return None
        return record

    def _write_files(self, recording: CheckedRecording, record: EntryRecord) -> None:
        name = record.entry.name
        self._disk.files.check_room(recording.size_bytes)
        self._disk.files.write(picture_name(name), recording.picture)
        for step, data in recording.latents.items():
            self._disk.files.write(latent_name(name, step), data)


def _to_record(recording: CheckedRecording, number: int, *, now: float, asked: float) -> EntryRecord:
    """Return the record of a recording.

    Args:
        asked: Time on the policy's clock.
    """
    digest = _digest(recording.picture)
    entry = Entry(
        number=number,
        name=secrets.token_hex(16),
        noise=noise_of(recording.parameters, number),
        key=recording.key,
        model_hash=recording.model_hash,
        dtype=recording.dtype,
        shape=recording.shape,
        picture=EntryPicture(height=recording.height, width=recording.width, digest=digest),
        recorded_s=now,
    )
    return EntryRecord(
        entry=entry,
        embedding=recording.embedding.tobytes(),
        parameters=recording.parameters,
        hits=0,
        latents={
            step: KeptLatent(digest=_digest(data), usage=new_usage(step, asked))
            for step, data in recording.latents.items()
        },
    )


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _files_of(record: EntryRecord) -> list[str]:
    name = record.entry.name
    return [picture_name(name), *(latent_name(name, step) for step in record.latents)]
