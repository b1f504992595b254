"""What is known of a LoRA as a row with a checksum of itself, so that damage is seen and never answered with.

The same values stand in the catalogue and in the description beside a LoRA's file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from bottega.errors import DataLoss
from bottega.loras.records import CatalogueRecord
from bottega.storage.checksums import Value, checksum

COLUMNS = (*(field.name for field in fields(CatalogueRecord)), "checksum")
"""In the order of `to_row` and `from_row`."""


def to_row(record: CatalogueRecord) -> tuple[Value, ...]:
    """The values of COLUMNS."""
    values = tuple(_value(getattr(record, column)) for column in COLUMNS[:-1])
    return (*values, checksum(values))


def _value(said: Value | tuple[object, ...]) -> Value:
    if isinstance(said, tuple):
        return json.dumps(said)
    return int(said) if isinstance(said, bool) else said


def from_row(row: Sequence[Any]) -> CatalogueRecord:
    """The record of the values of COLUMNS. Raises DataLoss when they are not what was written."""
    *values, expected = row
    if len(row) != len(COLUMNS) or checksum(values) != expected:
        raise damaged_row(str(row[0]))
    name, digest, base, rank, modules, size_bytes, text_bytes, words, kind, bounds, pinned, added_s = values
    try:
        return CatalogueRecord(
            name=str(name),
            digest=str(digest),
            base=str(base),
            rank=int(rank),
            modules=int(modules),
            size_bytes=int(size_bytes),
            text_bytes=int(text_bytes),
            trigger_words=tuple(json.loads(str(words))),
            format=str(kind),
            bounds=tuple((int(steps), int(bound)) for steps, bound in json.loads(str(bounds))),
            pinned=bool(pinned),
            added_s=float(added_s),
        )
    except (ValueError, TypeError) as error:
        raise damaged_row(str(name)) from error


def damaged_row(name: str) -> DataLoss:
    """The error for a LoRA whose row does not read as it was written."""
    return DataLoss(
        f"what the catalogue says of {name} is damaged; `bottega loras rebuild` brings it back from its file",
        metadata={"loras": name},
    )
