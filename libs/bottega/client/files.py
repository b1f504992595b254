"""Atomic writes of files."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(target: Path, data: bytes) -> None:
    """Replace a file in one step, so that a reader never sees a part of it."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
