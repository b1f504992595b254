"""Entries and latents on the disk: rows of the database, and names of files.

latents/ab/<entry>@<step>    a latent's elements latents/ab/<entry>.rgb       the picture of an entry
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from google.protobuf.message import DecodeError

from bottega.blobstore import (
    BlobDisk,
    BlobRecords,
    Completion,
    NewRows,
    RecordSchema,
    RecordTable,
    StoredRecord,
    StoredRow,
)
from bottega.blobstore.records import Values
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

_FILE_NAMES = re.compile(r"[0-9a-f]{32}(@[0-9]{1,3}|\.rgb)")
# Number of entries that are passed on at once; their embeddings take some tens of megabytes.
_MOST_AT_ONCE = 10_000
# Number of entries that are read in one statement. SQLite accepts 32,766 values in one.
_PAGE = 1000
# Upper bound on stored counts: from here on, adding 1 to a double has no effect.
_MOST_COUNTED = 2.0**53

TakeEntries = Callable[[str, Sequence[EntryRecord]], None]
"""Receives stored entries of one key."""


def cache_disk(folder: Path, *, min_free_bytes: int) -> BlobDisk:
    """Return the disk of a cache: its database and its folder of files."""
    return BlobDisk(folder, files="latents", names=_FILE_NAMES, schema=SCHEMA, min_free_bytes=min_free_bytes)


def latent_name(entry: str, step: int) -> str:
    """Return the name of a latent's file."""
    return f"{entry}@{step}"


def picture_name(entry: str) -> str:
    """Return the name of a picture's file."""
    return f"{entry}.rgb"


def load_entries(disk: BlobDisk, take: TakeEntries) -> None:
    """Pass all stored entries to `take`, some thousands of a key at a time, with those latents whose files exist."""
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

    disk.load(complete, suffix="ORDER BY key")
    pass_on()


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


def read_entry(stored: StoredRecord) -> EntryRecord:
    """Convert an undamaged row to an entry."""
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


def read_parameters(records: BlobRecords, numbers: Collection[int]) -> dict[int, bytes]:
    """Read the serialized parameters of existing entries. Raises StorageUnavailable, DataLoss."""
    wanted = list(numbers)

    def read(connection: sqlite3.Connection) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        for first in range(0, len(wanted), _PAGE):
            page = wanted[first : first + _PAGE]
            places = ", ".join("?" * len(page))
            found.update(connection.execute(f"SELECT number, parameters FROM entries WHERE number IN ({places})", page))
        return found

    return records.transact(read)


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
