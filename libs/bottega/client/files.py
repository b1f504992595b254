"""Files that are written whole or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path


def write_whole(target: Path, data: bytes) -> None:
    """Replaces `target` by `data` in one step, so that a reader never sees half of it."""
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    try:
        beside.write_bytes(data)
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
