"""Descriptions: a copy of a LoRA's record in a small file beside its weights, from which the catalogue can be rebuilt.

    <digest>.<first 16 digits of the name's SHA-256>.json    one file for each name of the digest

The record cannot be in the weights' own header, because other names and stores use the same weights and their SHA-256.
Calls may wait for the disk and raise OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from bottega.errors import DataLoss
from bottega.loras.records import COLUMNS, CatalogueRecord, from_row, to_row
from bottega.storage import folders

SUFFIX = ".json"
_FORMAT = "bottega.addons.loras.wire.description/1"
_NAME_DIGITS = 16
_STEM = re.compile(rf"([0-9a-f]{{64}})\.[0-9a-f]{{{_NAME_DIGITS}}}")
# Sixteen trigger words of 200 characters take at most 40 KiB.
_MAX_BYTES = 256 << 10


def stem_of(digest: str, name: str) -> str:
    """Return the name of a description's file, without its suffix."""
    return f"{digest}.{hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]}"


def digest_of(stem: str) -> str | None:
    """Return the digest in the name of a description's file; None if the name has another form."""
    matched = _STEM.fullmatch(stem)
    return matched[1] if matched else None


def write(folder: Path, record: CatalogueRecord, *, partial: Path) -> None:
    """Write a record's description into a folder, and wait until it is on the disk.

    Args:
        folder: The folder of its weights.
        record: The record.
        partial: A new empty file on the same disk, which becomes the description, or is deleted on an error.
    """
    content = {"format": _FORMAT, "lora": dict(zip(COLUMNS, to_row(record), strict=True))}
    target = folder / f"{stem_of(record.digest, record.name)}{SUFFIX}"
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised
            partial.unlink(missing_ok=True)
        raise
    folders.sync(folder)


def read(path: Path) -> CatalogueRecord:
    """Return the record in a description. Raises DataLoss if it is damaged, or belongs to another file name."""
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    try:
        content = json.loads(text)
        values = [content["lora"][column] for column in COLUMNS]
        known = content["format"] == _FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        known, values = False, []
    if not known or len(text) > _MAX_BYTES:
        raise DataLoss(f"the description {path.name} is damaged")
    record = from_row(values)
    if path.stem != stem_of(record.digest, record.name):
        raise DataLoss(f"the description {path.name} belongs to another LoRA")
    return record
