"""Entries and latents as rows, each with a checksum, so that damaged ones are noticed and never served.

Usage changes often and is not in the checksum: damage there only makes a latent stay too long or go too early.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from bottega.cache.latent import Entry, EntryPicture, EntryRecord, KeptLatent
from bottega.planning.eviction import Usage
from bottega.storage import SqliteSchema
from bottega.storage.checksums import Value, checksum
from bottega.transport import DType
from bottega.v1.generation_pb2 import GenerationSpec

ENTRY_COLUMNS = (
    "number",
    "name",
    "key",
    "model_hash",
    "dtype",
    "shape",
    "picture_height",
    "picture_width",
    "picture_digest",
    "recorded_s",
    "embedding",
    "parameters",
    "checksum",
    "hits",
)
"""Columns in the order of `entry_row` and `read_entry`."""

LATENT_COLUMNS = ("number", "step", "digest", "checksum", "frequency", "used_at", "created_at")
"""Columns in the order of `latent_row` and `read_latent`."""

_TABLES = (
    """
    CREATE TABLE entries (
        number INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        key TEXT NOT NULL,
        model_hash TEXT NOT NULL,
        dtype INTEGER NOT NULL,
        shape TEXT NOT NULL,
        picture_height INTEGER NOT NULL,
        picture_width INTEGER NOT NULL,
        picture_digest BLOB NOT NULL,
        recorded_s REAL NOT NULL,
        embedding BLOB NOT NULL,
        parameters BLOB NOT NULL,
        checksum INTEGER NOT NULL,
        hits INTEGER NOT NULL
    ) STRICT
    """,
    "CREATE INDEX entries_key ON entries (key)",
    """
    CREATE TABLE latents (
        number INTEGER NOT NULL,
        step INTEGER NOT NULL,
        digest BLOB NOT NULL,
        checksum INTEGER NOT NULL,
        frequency REAL NOT NULL,
        used_at REAL NOT NULL,
        created_at REAL NOT NULL,
        PRIMARY KEY (number, step)
    ) STRICT, WITHOUT ROWID
    """,
)

# Questions and uses are counted in double precision, where adding 1 has no effect from here on.
_MOST_COUNTED = 2.0**53

SCHEMA = SqliteSchema(
    what="the records of cached latents",
    # "BtCa", the value of PRAGMA application_id in our files.
    application_id=0x42744361,
    version=1,
    tables=_TABLES,
    remedy="pictures that are drawn, or bottega cache warm, fill it again",
)


def entry_row(record: EntryRecord) -> tuple[Value, ...]:
    """Return the values of ENTRY_COLUMNS."""
    entry = record.entry
    values = (
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
    return (*values, checksum(values), record.hits)


def latent_row(number: int, step: int, latent: KeptLatent) -> tuple[Value, ...]:
    """Return the values of LATENT_COLUMNS."""
    values = (number, step, latent.digest)
    usage = latent.usage
    return (*values, checksum(values), usage.frequency, usage.used_at, usage.created_at)


def read_entry(row: Sequence[Any], latents: Mapping[int, KeptLatent]) -> EntryRecord | None:
    """Return the record of the values of ENTRY_COLUMNS; None if they are damaged."""
    *values, expected, hits = row
    if checksum(values) != expected:
        return None
    number, name, key, model_hash, dtype, shape, height, width, digest, recorded_s, embedding, parameters = values
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
        entry=entry, embedding=embedding, parameters=parameters, hits=max(0, hits), latents=dict(latents)
    )


def noise_of(parameters: bytes, number: int) -> int:
    """Return the seed in an entry's parameters; without one, a negative number that is unique to the entry."""
    try:
        spec = GenerationSpec.FromString(parameters)
    except DecodeError:
        return -1 - number
    return spec.seed if spec.HasField("seed") else -1 - number


def read_latent(row: Sequence[Any], step: int) -> KeptLatent | None:
    """Return the latent of the values of LATENT_COLUMNS; None if they are damaged."""
    *values, expected, frequency, used_at, created_at = row
    if checksum(values) != expected:
        return None
    found = (frequency, used_at, created_at)
    sound = all(0.0 <= value < _MOST_COUNTED for value in found) and used_at >= created_at
    usage = Usage(frequency=frequency, used_at=used_at, created_at=created_at, step=step) if sound else Usage(step=step)
    return KeptLatent(digest=values[2], usage=usage)
