"""What the catalogue says of a LoRA, in a small file beside its weights, so that the catalogue can be made from files.

    <digest>.<first 16 digits of the name's SHA-256>.json    one for each name of the digest

Not in the weights' own header: their SHA-256 is their name, also for other stores and names that have the same weights.
Its calls may wait for the disk and raise OSError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path

from bottega.errors import DataLoss
from bottega.loras.catalogue_rows import COLUMNS, from_row, to_row
from bottega.loras.records import CatalogueRecord
from bottega.storage import folders

SUFFIX = ".json"
_FORMAT = "bottega.lora.description/1"
_NAME_DIGITS = 16
_STEM = re.compile(rf"([0-9a-f]{{64}})\.[0-9a-f]{{{_NAME_DIGITS}}}")
# Sixteen trigger words of 200 characters take 40 KiB at most.
_MAX_BYTES = 256 << 10


def stem_of(digest: str, name: str) -> str:
    """The file name of a description, without its suffix."""
    return f"{digest}.{hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]}"


def digest_of(stem: str) -> str | None:
    """Of the weights that a description with that name is of; None for another name."""
    matched = _STEM.fullmatch(stem)
    return matched[1] if matched else None


def write(folder: Path, record: CatalogueRecord, *, partial: Path) -> None:
    """It is in the folder, and on the disk, when this returns. partial: an own new file of the same disk."""
    said = {"format": _FORMAT, "lora": dict(zip(COLUMNS, to_row(record), strict=True))}
    target = folder / f"{stem_of(record.digest, record.name)}{SUFFIX}"
    try:
        with partial.open("w", encoding="utf-8") as file:
            json.dump(said, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that led here is the one to tell
            partial.unlink(missing_ok=True)
        raise
    folders.sync(folder)


def read(path: Path) -> CatalogueRecord:
    """Raises DataLoss for what is not as it was written, or is of other weights than its name says."""
    with path.open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    try:
        said = json.loads(text)
        values = [said["lora"][column] for column in COLUMNS]
        known = said["format"] == _FORMAT
    except (ValueError, KeyError, TypeError, RecursionError):
        known, values = False, []
    if not known or len(text) > _MAX_BYTES:
        raise DataLoss(f"the description {path.name} is damaged")
    record = from_row(values)
    if path.stem != stem_of(record.digest, record.name):
        raise DataLoss(f"the description {path.name} is of something else")
    return record
