"""Copies small data on the event loop and large data in a thread. This module does not know what is copied.

Copying, packing and parsing 1 MiB costs up to a millisecond of CPU, hashing it somewhat more; handing it to a thread
costs some hundred microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

LARGE_BYTES = 256 * 2**10

ResultT = TypeVar("ResultT")


async def copied(size_bytes: int, work: Callable[[], ResultT]) -> ResultT:
    """Return the result of `work`, which passes over about `size_bytes` once or twice and does not block otherwise."""
    return work() if size_bytes <= LARGE_BYTES else await asyncio.to_thread(work)
