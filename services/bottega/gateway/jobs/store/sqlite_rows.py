"""Job records as rows of SQLite. A row carries a checksum of itself, so that damage is seen and never answered with.

SQLite's own format has none: a flipped bit in a page may read as another prompt. Knows no statement beyond its columns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from bottega.errors import DataLoss
from bottega.gateway.jobs.store.record import JobRecord
from bottega.gateway.jobs.store.sqlite_errors import damaged
from bottega.gateway.jobs.values import StoredImage
from bottega.storage.checksums import Value, checksum

COLUMNS = (
    "job_id",
    "request_id",
    "log_id",
    "ends_with_caller",
    "fingerprint",
    "state",
    "spec",
    "latent_height",
    "latent_width",
    "image_digest",
    "size_bytes",
    "created_wall",
    "started_wall",
    "ended_wall",
    "deadline_wall",
    "attempt",
    "deaths",
    "decisions",
    "images",
    "provenance",
    "error",
    "peer",
    "ended_steady",
    "checksum",
)
"""In the order of `to_row`; `from_row` expects `sequence` before them."""


def to_row(record: JobRecord) -> tuple[Value, ...]:
    """The values of COLUMNS."""
    values: tuple[Value, ...] = (
        record.job_id,
        record.request_id,
        record.log_id,
        int(record.ends_with_caller),
        record.fingerprint,
        int(record.state),
        record.spec,
        *record.shape,
        record.image_digest,
        record.size_bytes,
        float(record.created_wall),
        _real(record.started_wall),
        _real(record.ended_wall),
        _real(record.deadline_wall),
        record.attempt,
        record.deaths,
        record.decisions,
        json.dumps([[image.digest, image.size_bytes] for image in record.images]),
        record.provenance,
        record.error,
        record.peer,
        _real(record.ended_steady),
    )
    return (*values, checksum(values))


def from_row(row: Sequence[Any]) -> JobRecord:
    """The record of a row of `sequence` and COLUMNS. Raises DataLoss when the row is not what was written."""
    sequence, *values, expected = row
    if checksum(values) != expected:
        raise _damaged_row(sequence)
    job_id, request_id, log_id, ends_with_caller, fingerprint, state, spec, height, width = values[:9]
    image_digest, size_bytes, created, started, ended, deadline, attempt, deaths = values[9:17]
    decisions, images, provenance, error, peer, ended_steady = values[17:]
    return JobRecord(
        job_id=job_id,
        request_id=request_id,
        log_id=log_id,
        ends_with_caller=bool(ends_with_caller),
        peer=peer,
        fingerprint=fingerprint,
        state=state,
        spec=spec,
        shape=(height, width),
        image_digest=image_digest,
        size_bytes=size_bytes,
        created_wall=created,
        started_wall=started,
        ended_wall=ended,
        ended_steady=ended_steady,
        deadline_wall=deadline,
        attempt=attempt,
        deaths=deaths,
        decisions=decisions,
        images=tuple(StoredImage(digest=digest, size_bytes=size) for digest, size in json.loads(images)),
        provenance=provenance,
        error=error,
        sequence=sequence,
    )


def intact(data: bytes, expected: int, sequence: int) -> bytes:
    """`data`, when it has its checksum. Raises DataLoss."""
    if checksum([data]) != expected:
        raise _damaged_row(sequence)
    return data


def _real(seconds: float | None) -> float | None:
    return None if seconds is None else float(seconds)


def _damaged_row(sequence: int) -> DataLoss:
    error = damaged()
    error.metadata["sequence"] = str(sequence)
    return error
