"""Records of jobs as rows of SQL: the columns, which every store has, and the conversion of their values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from bottega.gateway.jobs.store.job_store import JobRecord
from bottega.gateway.jobs.values import StoredImage
from bottega.storage.sqlite_files import Value

VALUES = (
    "job_id",
    "tenant",
    "request_id",
    "log_id",
    "ends_with_caller",
    "priority",
    "fingerprint",
    "state",
    "spec",
    "latent_height",
    "latent_width",
    "evaluations_per_step",
    "keeps_steps",
    "image_digest",
    "mask_digest",
    "kept_digest",
    "result_width",
    "result_height",
    "edit_source",
    "computed_share",
    "size_bytes",
    "created_wall",
    "started_wall",
    "ended_wall",
    "deadline_steady",
    "attempt",
    "deaths",
    "decisions",
    "images",
    "picture_bytes",
    "provenance",
    "error",
    "peer",
    "webhook",
    "ended_steady",
    "result_key",
    "steps_done",
)
"""Names of the columns, in the order of `values_of`."""
# Columns of floats. They are converted first: an integer would be read back as a float, with another checksum.
_REAL = frozenset(
    {
        "evaluations_per_step",
        "computed_share",
        "created_wall",
        "started_wall",
        "ended_wall",
        "deadline_steady",
        "ended_steady",
    }
)
_IMAGE = tuple(field.name for field in dataclasses.fields(StoredImage))


def values_of(record: JobRecord) -> tuple[Value, ...]:
    """Return the values of a record, in the order of VALUES."""
    height, width = record.shape
    result_width, result_height = record.result_size
    special: dict[str, Value] = {
        "latent_height": height,
        "latent_width": width,
        "result_width": result_width,
        "result_height": result_height,
        "images": json.dumps([dataclasses.astuple(image) for image in record.images]),
    }
    return tuple(special[name] if name in special else _plain(name, getattr(record, name)) for name in VALUES)


def record_of(sequence: int, values: Sequence[Any]) -> JobRecord:
    """Return the record with these values, in the order of VALUES."""
    fields = dict(zip(VALUES, values, strict=True))
    shape = fields.pop("latent_height"), fields.pop("latent_width")
    result_size = fields.pop("result_width"), fields.pop("result_height")
    # Another version may have written it, with more or fewer fields.
    images = tuple(StoredImage(**dict(zip(_IMAGE, image, strict=False))) for image in json.loads(fields.pop("images")))
    del fields["picture_bytes"]  # it is only for sums in SQL
    for name in ("ends_with_caller", "keeps_steps"):
        fields[name] = bool(fields[name])
    return JobRecord(sequence=sequence, shape=shape, result_size=result_size, images=images, **fields)


def _plain(name: str, value: Any) -> Value:
    if value is None or (not isinstance(value, bool) and name not in _REAL):
        return value
    return float(value) if name in _REAL else int(value)
