"""Stored entries and latents: rows of the database, names of files, and the store in a folder.

latents/ab/<entry>@<step>    a latent's elements latents/ab/<entry>.rgb       the picture of an entry
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from google.protobuf.message import DecodeError

from bottega.addons.cache.placement import placement_key
from bottega.blobstore.records import NewRows, RecordChanges, RecordSchema, RecordTable, StoredRecord, StoredRow, Values
from bottega.blobstore.writer import BlobDisk, Completion, StoreDisk
from bottega.cache.eviction import Usage
from bottega.cache.latent import Entry, EntryPicture, EntryRecord, KeptLatent
from bottega.transport import DType
from bottega.v1.generation_pb2 import GenerationSpec

SCHEMA = RecordSchema(
    what="the records of cached latents",
    # "BtCa".
    application_id=0x42744361,
    version=2,
    remedy="new pictures, or bottega cache warm, fill it again",
    records=RecordTable(
        name="entries",
        fixed=(
            "number INTEGER",
            "name TEXT",
            "key TEXT",
            "model_hash TEXT",
            "dtype INTEGER",
            "shape TEXT",
            "picture_height INTEGER",
            "picture_width INTEGER",
            "picture_digest BLOB",
            "recorded_s REAL",
            "embedding BLOB",
            "parameters BLOB",
        ),
        changing=("hits INTEGER",),
    ),
    indexes=("CREATE INDEX entries_key ON entries (key)",),
    parts=RecordTable(
        name="latents",
        fixed=("number INTEGER", "step INTEGER", "digest BLOB"),
        key_columns=2,
        changing=("frequency REAL", "used_at REAL", "created_at REAL"),
    ),
)

FILE_NAMES = re.compile(r"[0-9a-f]{32}(@[0-9]{1,3}|\.rgb)")
"""Matches the names of a cache's files."""
# Number of entries that are passed on at once; their embeddings take some tens of megabytes.
_MOST_AT_ONCE = 10_000
# Number of entries that are read in one statement. SQLite accepts 32,766 values in one.
_PAGE = 1000
# Upper bound on stored counts: from here on, adding 1 to a double has no effect.
_MOST_COUNTED = 2.0**53

TakeEntries = Callable[[str, Sequence[EntryRecord]], None]
"""Receives stored entries of one key."""


class EntryDisk(StoreDisk, Protocol):
    """The stored entries of a cache. The writer's thread calls it.

    Any thread may use `read`, `sharing` and `set_profile`.
    """

    @property
    def sharing(self) -> int:
        """Number of living caches that share the entries, this one included."""
        ...

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        """Return the content of a file; None if it does not exist or is damaged."""

    def load_entries(self, known: Collection[int], take: TakeEntries) -> Collection[int]:
        """Pass the cache's entries that are not known to `take`, some thousands of a key at a time.

        Args:
            known: Numbers of the known entries.

        Returns:
            Numbers of the known entries that are not this cache's any more.
        """

    def parameters(self, numbers: Collection[int]) -> dict[int, bytes]:
        """Return the serialized parameters of existing entries."""

    def exchange_profiles(self, own: Mapping[str, bytes]) -> Mapping[str, bytes]:
        """Add profiles for models that have none in other caches, and return the profiles that all caches have.

        Args:
            own: Serialized profiles by model hash.
        """

    def set_profile(self, model_hash: str, profile: bytes) -> None:
        """Replace the profile of a model for all caches. An empty one stands for none."""

    def make_room(self) -> None:
        """Delete discarded files now, if that frees space for files to be written."""

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write the files of an entry."""

    def write_entries(self, changes: RecordChanges, records: Collection[EntryRecord]) -> None:
        """Write changes and new entries in one transaction. The files of the new entries must exist."""

    def discard(self, names: Iterable[str]) -> None:
        """Delete these files later."""

    def renew(self, used_bytes: int) -> bool:
        """Return whether entries may have moved to or from other caches. To be called every few seconds.

        Args:
            used_bytes: Bytes of this cache's entries.
        """

    def budget_bytes(self, budget_bytes: int) -> int:
        """Return the bytes that this cache's entries may have.

        Args:
            budget_bytes: The configured budget of all entries in the store.
        """


class LocalEntries(BlobDisk):
    """An EntryDisk in a folder: records in SQLite, and files.

    Args:
        min_free_bytes: See BlobDisk.
    """

    def __init__(self, folder: Path, *, min_free_bytes: int) -> None:
        super().__init__(folder, files="latents", names=FILE_NAMES, schema=SCHEMA, min_free_bytes=min_free_bytes)
        self.sharing = 1

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        return self.files.read(name, digest=digest, size_bytes=size_bytes)

    def load_entries(self, known: Collection[int], take: TakeEntries) -> Collection[int]:
        """Pass all entries to `take`, those latents whose files exist. Nothing may be known."""
        waiting: list[EntryRecord] = []

        def pass_on() -> None:
            if waiting:
                take(waiting[0].entry.key, tuple(waiting))
                waiting.clear()

        def complete(stored: StoredRecord, names: set[str]) -> Completion:
            record = read_entry(stored)
            entry = record.entry
            present = {step: kept for step, kept in record.latents.items() if latent_name(entry.name, step) in names}
            if not present:
                return Completion()
            if waiting and (waiting[0].entry.key != entry.key or len(waiting) == _MOST_AT_ONCE):
                pass_on()
            waiting.append(replace(record, latents=present))
            return Completion(
                files=[picture_name(entry.name), *(latent_name(entry.name, step) for step in present)],
                missing=[(entry.number, step) for step in record.latents.keys() - present.keys()],
            )

        self.load(complete, suffix="ORDER BY key")
        pass_on()
        return ()

    def parameters(self, numbers: Collection[int]) -> dict[int, bytes]:
        wanted = list(numbers)

        def read(connection: sqlite3.Connection) -> dict[int, bytes]:
            found: dict[int, bytes] = {}
            for first in range(0, len(wanted), _PAGE):
                page = wanted[first : first + _PAGE]
                places = ", ".join("?" * len(page))
                query = f"SELECT number, parameters FROM entries WHERE number IN ({places})"
                found.update(connection.execute(query, page))
            return found

        return self.records.transact(read)

    def exchange_profiles(self, own: Mapping[str, bytes]) -> Mapping[str, bytes]:
        return own

    def set_profile(self, model_hash: str, profile: bytes) -> None:
        """Do nothing: no other cache shares these entries."""

    def write_files(self, files: Mapping[str, bytes]) -> None:
        self.files.check_room(sum(map(len, files.values())))
        for name, data in files.items():
            self.files.write(name, data)

    def write_entries(self, changes: RecordChanges, records: Collection[EntryRecord]) -> None:
        self.write(changes, new_rows(records))

    def renew(self, used_bytes: int) -> bool:
        return False

    def budget_bytes(self, budget_bytes: int) -> int:
        return budget_bytes


def latent_name(entry: str, step: int) -> str:
    """Return the name of a latent's file."""
    return f"{entry}@{step}"


def picture_name(entry: str) -> str:
    """Return the name of a picture's file."""
    return f"{entry}.rgb"


def new_rows(records: Collection[EntryRecord]) -> NewRows:
    """Convert new entries and their latents to database rows."""
    return NewRows(
        records=tuple((_entry_values(record), (record.hits,)) for record in records),
        parts=tuple(
            latent_row(record.entry.number, step, latent)
            for record in records
            for step, latent in record.latents.items()
        ),
    )


def latent_row(number: int, step: int, latent: KeptLatent) -> tuple[Values, Values]:
    """Return the fixed and the changeable columns of a latent's row."""
    return (number, step, latent.digest), usage_values(latent.usage)


def usage_values(usage: Usage) -> Values:
    """Return the changeable columns of a latent's row."""
    return usage.frequency, usage.used_at, usage.created_at


def read_entry(stored: StoredRecord, place: str = "") -> EntryRecord:
    """Convert an undamaged row to an entry.

    Args:
        place: By default, that of an entry without LoRAs.
    """
    number, name, key, model_hash, dtype, shape, height, width, digest, recorded_s, embedding, parameters = (
        stored.row.values
    )
    entry = Entry(
        number=number,
        name=name,
        noise=noise_of(parameters, number),
        key=key,
        model_hash=model_hash,
        dtype=DType(dtype),
        shape=tuple(json.loads(shape)),
        picture=EntryPicture(height=height, width=width, digest=digest),
        recorded_s=recorded_s,
        place=place or placement_key(key, np.frombuffer(embedding, np.float32)),
    )
    return EntryRecord(
        entry=entry,
        embedding=embedding,
        parameters=parameters,
        hits=max(0, stored.row.use[0]),
        latents={part.key[1]: read_latent(part) for part in stored.parts},
    )


def read_latent(row: StoredRow) -> KeptLatent:
    """Convert an undamaged row to a latent. Replace an impossible usage by that of a new latent."""
    (_, step), digest = row.key, row.values[2]
    frequency, used_at, created_at = row.use
    sound = all(0.0 <= value < _MOST_COUNTED for value in row.use) and used_at >= created_at
    usage = Usage(frequency=frequency, used_at=used_at, created_at=created_at, step=step) if sound else Usage(step=step)
    return KeptLatent(digest=digest, usage=usage)


def noise_of(parameters: bytes, number: int) -> int:
    """Return the seed in an entry's parameters; if it has none, a negative number that is unique to the entry."""
    try:
        spec = GenerationSpec.FromString(parameters)
    except DecodeError:
        return -1 - number
    return spec.seed if spec.HasField("seed") else -1 - number


def _entry_values(record: EntryRecord) -> Values:
    entry = record.entry
    return (
        entry.number,
        entry.name,
        entry.key,
        entry.model_hash,
        int(entry.dtype),
        json.dumps(entry.shape),
        entry.picture.height,
        entry.picture.width,
        entry.picture.digest,
        entry.recorded_s,
        record.embedding,
        record.parameters,
    )
