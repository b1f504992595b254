"""A file in which a server remembers something over restarts: a JSON object, replaced whole. Knows no values."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping
from pathlib import Path

from bottega.errors import ConfigError, StorageUnavailable
from bottega.process import open_files
from bottega.storage import folders


def read_record(file: Path) -> dict[str, object]:
    """What is in the file; nothing where there is none. Raises ConfigError naming it where it cannot be used."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise unusable(file, str(error)) from None
    if not isinstance(record, dict):
        raise unusable(file, "it is no object")
    return record


def write_record(file: Path, record: Mapping[str, object]) -> None:
    """Replaces what is in the file. Raises StorageUnavailable, and then it is as it was."""
    partial = file.with_suffix(".new")
    try:
        folders.make(file.parent)
        with partial.open("w", encoding="utf-8") as written:
            json.dump(record, written, indent=1)
            written.flush()
            os.fsync(written.fileno())
        partial.replace(file)
        folders.sync(file.parent)
    except OSError as error:
        if open_files.is_cause(error):
            raise open_files.too_many(error) from None
        cause = errno.errorcode.get(error.errno or 0, "EIO")
        raise StorageUnavailable(f"{file} cannot be written: {error.strerror}", metadata={"cause": cause}) from None


def unusable(file: Path, why: str) -> ConfigError:
    """The error of a file whose content is not what it should be."""
    return ConfigError(f"{file} cannot be used: {why}; mend it or remove it")
