"""Checksums of stored values, to detect damage that neither SQLite nor the disk reports."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

Value = str | bytes | int | float | None
"""The value of a SQLite column."""


def checksum(values: Sequence[Value]) -> int:
    """Return the CRC-32 of values and their types. It detects accidents, not manipulation."""
    found = 0
    for value in values:
        raw = value if isinstance(value, bytes) else repr(value).encode()
        found = zlib.crc32(raw, zlib.crc32(b"%d" % len(raw), found))
    return found
