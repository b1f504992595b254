"""Where bytes are copied: small ones on the event loop, large ones in a thread.

Copying, packing and parsing 1 MiB costs up to a millisecond of CPU, hashing it somewhat more; handing it to a
thread costs some hundred microseconds. This module does not know what is copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LARGE_BYTES = 256 * 2**10

ResultT = TypeVar("ResultT")


async def copied(size_bytes: int, work: Callable[[], ResultT]) -> ResultT:
    """What `work` returns. It goes over about `size_bytes` once or twice and does not block otherwise."""
    return work() if size_bytes <= LARGE_BYTES else await asyncio.to_thread(work)
