"""Job records as rows of SQLite. Each row has a checksum, so that damaged rows are never used.

SQLite's own format has none: after a flipped bit in a page, another prompt may be read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bottega.errors import DataLoss
from bottega.gateway.jobs.store.record import JobRecord
from bottega.gateway.jobs.store.sqlite_errors import damaged
from bottega.gateway.jobs.values import StoredImage
from bottega.storage.checksums import Value, checksum

# Columns of the table and their types, in the order of `to_row`. `from_row` expects `sequence` before them.
TYPES = {
    "job_id": "TEXT NOT NULL UNIQUE",
    "tenant": "TEXT NOT NULL",
    "request_id": "TEXT NOT NULL",
    "log_id": "TEXT NOT NULL",
    "ends_with_caller": "INTEGER NOT NULL",
    "priority": "INTEGER NOT NULL",
    "fingerprint": "TEXT NOT NULL",
    "state": "INTEGER NOT NULL",
    "spec": "BLOB NOT NULL",
    "latent_height": "INTEGER NOT NULL",
    "latent_width": "INTEGER NOT NULL",
    "image_digest": "TEXT NOT NULL",
    "mask_digest": "TEXT NOT NULL",
    "kept_latents": "TEXT NOT NULL",
    "result_width": "INTEGER NOT NULL",
    "result_height": "INTEGER NOT NULL",
    "template": "TEXT NOT NULL",
    "computed_share": "REAL NOT NULL",
    "size_bytes": "INTEGER NOT NULL",
    "created_wall": "REAL NOT NULL",
    "started_wall": "REAL",
    "ended_wall": "REAL",
    "deadline_steady": "REAL",
    "attempt": "INTEGER NOT NULL",
    "deaths": "INTEGER NOT NULL",
    "decisions": "BLOB NOT NULL",
    "images": "TEXT NOT NULL",
    "picture_bytes": "INTEGER NOT NULL",
    "provenance": "BLOB NOT NULL",
    "error": "BLOB NOT NULL",
    "peer": "TEXT NOT NULL",
    "ended_steady": "REAL",
    "result_key": "TEXT NOT NULL",
    "steps_done": "INTEGER NOT NULL",
    "checksum": "INTEGER NOT NULL",
}
COLUMNS = tuple(TYPES)
# Columns that are stored as REAL: an integer would be read as a value that differs from what the checksum is of.
_REAL = frozenset(name for name, kind in TYPES.items() if kind.startswith("REAL"))


def to_row(record: JobRecord) -> tuple[Value, ...]:
    """Return the values of COLUMNS for a record."""
    height, width = record.shape
    result_width, result_height = record.result_size
    special: dict[str, Value] = {
        "latent_height": height,
        "latent_width": width,
        "result_width": result_width,
        "result_height": result_height,
        "images": json.dumps([dataclasses.astuple(image) for image in record.images]),
    }
    values = [special[name] if name in special else _plain(name, getattr(record, name)) for name in COLUMNS[:-1]]
    return (*values, checksum(values))


def from_row(row: Sequence[Any]) -> JobRecord:
    """Return the record of a row of `sequence` and COLUMNS. Raises DataLoss if the row is damaged."""
    sequence, *values, expected = row
    if checksum(values) != expected:
        raise _damaged_row(sequence)
    fields = dict(zip(COLUMNS, values, strict=False))
    shape = fields.pop("latent_height"), fields.pop("latent_width")
    result_size = fields.pop("result_width"), fields.pop("result_height")
    images = _images_of(fields.pop("images"))
    del fields["picture_bytes"]  # it is only for sums in SQL
    fields["ends_with_caller"] = bool(fields["ends_with_caller"])
    return JobRecord(sequence=sequence, shape=shape, result_size=result_size, images=images, **fields)


def _images_of(column: str) -> tuple[StoredImage, ...]:
    """Return the images of a row."""
    names = [field.name for field in dataclasses.fields(StoredImage)]
    return tuple(StoredImage(**dict(zip(names, values, strict=True))) for values in json.loads(column))


def intact(data: bytes, expected: int, sequence: int) -> bytes:
    """Return `data` if it has its checksum. Raises DataLoss otherwise."""
    if checksum([data]) != expected:
        raise _damaged_row(sequence)
    return data


def _plain(name: str, value: Any) -> Value:
    if value is None or (not isinstance(value, bool) and name not in _REAL):
        return value
    return float(value) if name in _REAL else int(value)


def _damaged_row(sequence: int) -> DataLoss:
    error = damaged()
    error.metadata["sequence"] = str(sequence)
    return error
