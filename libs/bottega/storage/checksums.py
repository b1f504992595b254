"""Checksums of values, for what is stored where nothing else notices a flipped bit."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

Value = str | bytes | int | float | None
"""What a column of SQLite holds."""


def checksum(values: Sequence[Value]) -> int:
    """CRC-32 over values and their kinds: it guards against accidents, not against people."""
    found = 0
    for value in values:
        raw = value if isinstance(value, bytes) else repr(value).encode()
        found = zlib.crc32(raw, zlib.crc32(b"%d" % len(raw), found))
    return found
