"""The catalogue's record of a LoRA, stored as a row with a checksum, and as a description beside its weights.

A description is a copy of the record in a small file, from which the catalogue can be rebuilt:

    <digest>.<first 16 digits of the name's SHA-256>.json    one file for each name of the digest

The record cannot be in the header of the weights, because other names and stores use the same weights and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from bottega.blobstore.records import RecordTable, StoredRow, Values
from bottega.errors import DataLoss
from bottega.storage.sqlite_files import Value, checksum

MAX_LISTED_IGNORED = 4
"""Upper bound on the ignored layers in a record. A LoRA's file has all of them."""
DESCRIPTION = ".json"
"""Suffix of description files."""
_FORMAT = "bottega.lora.description/3"
_NAME_DIGITS = 16
_DESCRIPTION_STEM = re.compile(rf"([0-9a-f]{{64}})\.[0-9a-f]{{{_NAME_DIGITS}}}")
MAX_DESCRIPTION_BYTES = 256 << 10
"""Upper bound on the bytes of a description. Sixteen trigger words of 200 characters take at most 40 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueRecord:
    """The catalogue's record of a LoRA. The message StoredLora explains the fields."""

    name: str
    digest: str
    base: str
    rank: int
    modules: int
    size_bytes: int
    text_bytes: int
    trigger_words: tuple[str, ...]
    format: str
    token: str = ""
    """Token of a textual inversion embedding, its only trigger word; "" for a LoRA."""
    ignored: tuple[str, ...] = ()
    """The first MAX_LISTED_IGNORED layers of its file that were ignored."""
    bounds: tuple[tuple[int, int], ...] = ()
    """Pairs of a number of steps and the latest step at which the LoRA may be applied."""
    pinned: bool = False
    added_s: float


LORAS = RecordTable(
    name="loras",
    fixed=(
        "name TEXT",
        "digest TEXT",
        "base TEXT",
        "rank INTEGER",
        "modules INTEGER",
        "size_bytes INTEGER",
        "text_bytes INTEGER",
        "trigger_words TEXT",
        "format TEXT",
        "token TEXT",
        "ignored TEXT",
        "bounds TEXT",
        "pinned INTEGER",
        "added_s REAL",
    ),
)
"""The catalogue's table. Its columns are the fields of CatalogueRecord."""


def values_of(record: CatalogueRecord) -> Values:
    """Convert a record to the values of a row."""
    return tuple(_value(getattr(record, field.name)) for field in fields(record))


def _value(field: Value | tuple[object, ...]) -> Value:
    if isinstance(field, tuple):
        return json.dumps(field)
    return int(field) if isinstance(field, bool) else field


def read_row(row: StoredRow) -> CatalogueRecord:
    """Convert a row to a record. Raises DataLoss if the row is damaged."""
    if not row.intact:
        raise damaged_row(str(row.key[0]))
    return _record(row.values)


def _record(values: Sequence[Any]) -> CatalogueRecord:
    name, digest, base, rank, modules, size_bytes, text_bytes, words, kind, token, ignored, bounds, pinned, added_s = (
        values
    )
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
            token=str(token),
            ignored=tuple(json.loads(str(ignored))),
            bounds=tuple((int(steps), int(bound)) for steps, bound in json.loads(str(bounds))),
            pinned=bool(pinned),
            added_s=float(added_s),
        )
    except (ValueError, TypeError) as error:
        raise damaged_row(str(name)) from error


def damaged_row(name: str) -> DataLoss:
    """Return the error for a damaged row."""
    return DataLoss(
        f"the catalogue's row of {name} is damaged; `bottega loras rebuild` restores it from the LoRA's file",
        metadata={"loras": name},
    )


def description_stem(digest: str, name: str) -> str:
    """Return the name of a description's file without its suffix."""
    return f"{digest}.{hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]}"


def described_digest(stem: str) -> str | None:
    """Return the digest in the name of a description's file, or None if the name has another form."""
    matched = _DESCRIPTION_STEM.fullmatch(stem)
    return matched[1] if matched else None


def description_of(record: CatalogueRecord) -> bytes:
    """Serialize a record as the content of its description."""
    values = values_of(record)
    names = [field.name for field in fields(record)]
    content = {"format": _FORMAT, "checksum": checksum(values), "lora": dict(zip(names, values, strict=True))}
    return json.dumps(content, indent=1).encode()


def read_description(text: bytes, stem: str) -> CatalogueRecord:
    """Read the record in a description. Raises DataLoss if it is damaged or has the wrong file name.

    Args:
        text: The content of its file, of which MAX_DESCRIPTION_BYTES + 1 bytes are enough.
        stem: The name of its file without suffix.
    """
    try:
        content = json.loads(text)
        values = [content["lora"][field.name] for field in fields(CatalogueRecord)]
        sound = content["format"] == _FORMAT and content["checksum"] == checksum(values)
    except (ValueError, KeyError, TypeError, RecursionError):
        sound, values = False, []
    if not sound or len(text) > MAX_DESCRIPTION_BYTES:
        raise DataLoss(f"the description {stem} is damaged")
    record = _record(values)
    if stem != description_stem(record.digest, record.name):
        raise DataLoss(f"the description {stem} belongs to another LoRA")
    return record
