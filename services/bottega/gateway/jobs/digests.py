"""The name of what is stored by content. Knows no store."""

from __future__ import annotations

import hashlib

from bottega.process import copied


async def digest(data: bytes) -> str:
    """SHA-256 in hex, off the event loop where it would hold it up."""
    return await copied(len(data), lambda: hashlib.sha256(data).hexdigest())
