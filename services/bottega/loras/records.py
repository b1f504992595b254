"""The catalogue's record of a LoRA, and its form as a row of values with a checksum, so that damage is noticed.

The catalogue and the description beside a LoRA's file hold the same values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from bottega.errors import DataLoss
from bottega.storage.checksums import Value, checksum


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRecord:
    """A LoRA in the catalogue. The message StoredLora explains the fields."""

    name: str
    digest: str
    base: str
    rank: int
    modules: int
    size_bytes: int
    text_bytes: int
    trigger_words: tuple[str, ...]
    format: str
    bounds: tuple[tuple[int, int], ...] = ()
    """Pairs of a number of steps and the latest step at which the LoRA may be applied."""
    pinned: bool = False
    added_s: float


COLUMNS = (*(field.name for field in fields(CatalogueRecord)), "checksum")
"""Names of a row's values, in the order of `to_row` and `from_row`."""


def to_row(record: CatalogueRecord) -> tuple[Value, ...]:
    """Return a record as the values of COLUMNS."""
    values = tuple(_value(getattr(record, column)) for column in COLUMNS[:-1])
    return (*values, checksum(values))


def _value(field: Value | tuple[object, ...]) -> Value:
    if isinstance(field, tuple):
        return json.dumps(field)
    return int(field) if isinstance(field, bool) else field


def from_row(row: Sequence[Any]) -> CatalogueRecord:
    """Return the record that `to_row` turned into these values. Raises DataLoss if they are damaged."""
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
    """Return the error for a LoRA whose row is damaged."""
    return DataLoss(
        f"the catalogue's row of {name} is damaged; `bottega loras rebuild` restores it from the LoRA's file",
        metadata={"loras": name},
    )
