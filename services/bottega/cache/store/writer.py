"""The writer thread of a store: it writes recordings, evictions, deletions and counts of uses.

The number and bytes of waiting recordings are bounded. To store some, the thread first evicts latents, then writes
files, then the database rows, and then makes the entries available to lookups.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections import deque
from collections.abc import Sequence

from bottega.blobstore.records import RecordChanges
from bottega.blobstore.writer import BlobWriter
from bottega.cache.latent import CheckedRecording, Entry, EntryPicture, EntryRecord, KeptLatent
from bottega.cache.profiles import CacheProfiles
from bottega.cache.records import EntryDisk, latent_name, noise_of, picture_name
from bottega.cache.store.contents import Contents, Removal, new_usage
from bottega.cache.store.settings import CacheCounts, Dropped, StoreSettings
from bottega.clocks import Clock
from bottega.errors import DataLoss, QueueFull, StorageUnavailable

# Upper bound on the recordings that are written at once, and on their share of the budgets.
_MOST_AT_ONCE = 64
_SHARE_AT_ONCE = 0.5
# Profiles that another cache has got meanwhile are looked for so often: every 30 s.
_TICKS_BETWEEN_PROFILES = 6


class Insertion:
    """Stores recordings and assigns numbers to the entries. If a call raises, none of its recordings was stored."""

    def __init__(
        self, settings: StoreSettings, *, contents: Contents, disk: EntryDisk, counts: CacheCounts, clock: Clock
    ) -> None:
        self._settings = settings
        self._contents = contents
        self._disk = disk
        self._counts = counts
        self._clock = clock
        self._last_number = 0

    def insert(self, recordings: Sequence[CheckedRecording]) -> None:
        """Store all recordings or none. A recording that the index refuses is skipped.

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
                    self._disk.write_files(_contents_of_files(recording, record))
            self._disk.write_entries(self._contents.table.take_changes(), written)
        except (StorageUnavailable, DataLoss):
            for record in written:
                self._contents.take_back(record)
                self._disk.discard(_files_of(record))
            raise
        for record in written:
            self._contents.add(record)
        self._counts.add("recorded", len(written))

    def make_room(self, recordings: Sequence[CheckedRecording] = ()) -> None:
        """Evict latents until the recordings fit into the budgets. Each eviction frees somewhat more than needed."""
        table, settings = self._contents.table, self._settings
        room_bytes = self._disk.budget_bytes(settings.budget_bytes)
        room_bytes -= sum(recording.file_bytes for recording in recordings)
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
        """Return how many bytes to free in addition, in whole latents; 0 if the budget is only a few latents."""
        spare_bytes = int(self._settings.batch_share * self._settings.budget_bytes)
        latent_bytes = max((recording.each_bytes for recording in recordings), default=1)
        return spare_bytes - spare_bytes % latent_bytes

    def _prepare(self, recording: CheckedRecording) -> EntryRecord | None:
        """Add a recording to the index and return its record, or None if the index refuses it."""
        now_s = self._clock.wall()
        self._last_number = max(self._last_number + 1, _new_number(now_s))
        record = _to_record(recording, self._last_number, now=now_s, asked=self._contents.table.now)
        try:
            self._contents.prepare(record)
        except (QueueFull, ValueError):
            self._counts.drop(Dropped.UNFIT)
            return None
        return record


def _to_record(recording: CheckedRecording, number: int, *, now: float, asked: float) -> EntryRecord:
    """Convert a recording to a record.

    Args:
        asked: Current time of the policy's clock.
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
        place=recording.place,
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


def _new_number(now_s: float) -> int:
    """Return a number above those of earlier entries that is not another cache's: milliseconds and 20 random bits."""
    return int(now_s * 1000.0) << 20 | secrets.randbits(20)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _files_of(record: EntryRecord) -> list[str]:
    name = record.entry.name
    return [picture_name(name), *(latent_name(name, step) for step in record.latents)]


def _contents_of_files(recording: CheckedRecording, record: EntryRecord) -> dict[str, bytes]:
    return dict(zip(_files_of(record), (recording.picture, *recording.latents.values()), strict=True))


class CacheWriter(BlobWriter):
    """The writer of a cache. Stored entries are read in the background."""

    def __init__(
        self,
        settings: StoreSettings,
        *,
        contents: Contents,
        disk: EntryDisk,
        profiles: CacheProfiles,
        counts: CacheCounts,
        clock: Clock,
    ) -> None:
        self._disk: EntryDisk
        super().__init__(disk, name="the approximate cache", retry_s=settings.retry_s, loads_in_background=True)
        self._settings = settings
        self._contents = contents
        self._table = contents.table
        self._profiles = profiles
        self._counts = counts
        self._ticks = 0
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
        """Queue a recording to be written, or drop it if the queue is full."""
        reason = self._enqueue(recording)
        if reason is None:
            self._thread.post(self._write_waiting)
        else:
            self._counts.drop(reason)

    def lose(self, removal: Removal) -> None:
        """Delete the files of damaged latents, which the table has already removed, in the background."""
        self._contents.forget(removal.entries)
        self._thread.post(lambda: self._disk.discard(removal.files))
        self._thread.post(self._tidy)

    def clear(self, model_hash: str) -> int:
        """Delete the entries of a model, or of all models for "". Return how many. Raises StorageUnavailable."""
        return self._thread.call(lambda: self._clear(model_hash))

    def parameters(self, entries: Sequence[Entry]) -> dict[int, bytes]:
        """Read the serialized parameters of entries, by number. Raises StorageUnavailable, DataLoss."""
        numbers = [entry.number for entry in entries]
        return self._thread.call(lambda: self._disk.parameters(numbers))

    def _enqueue(self, recording: CheckedRecording) -> Dropped | None:
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
        self._share_profiles()
        self._disk.load_entries((), self._take)
        self._contents.loaded()
        self._insertion.make_room()

    def _take(self, key: str, records: Sequence[EntryRecord]) -> None:
        self._check_closing()
        self._contents.load(key, records)

    def _take_changes(self) -> RecordChanges:
        return self._table.take_changes()

    def _probe(self) -> None:
        super()._probe()
        self._contents.index.probe()

    def _tick(self) -> None:
        super()._tick()
        self._attempt(self._follow)

    def _share_profiles(self) -> None:
        self._profiles.take_over(self._disk.exchange_profiles(self._profiles.serialized()))

    def _follow(self) -> None:
        """Load entries that became this cache's, and forget those that became another one's. Exchange profiles."""
        self._ticks += 1
        if self._loaded and not self._trouble and self._ticks % _TICKS_BETWEEN_PROFILES == 0:
            self._share_profiles()
        if self._disk.renew(self._table.size_bytes) and self._loaded and not self._trouble:
            gone = self._disk.load_entries(self._table.numbers(), self._take)
            self._contents.forget(self._table.leave(gone))
            self._contents.loaded()
        if self._loaded and not self._trouble:
            self._insertion.make_room()  # other caches may have taken more of the budget

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
