"""Waits of tests for what must happen, where how long it takes is not what is tested: one bound for all of them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

# Far more than anything takes on a machine that has other work, and less than a test may take in all.
EVENTUALLY_S = 90.0
_POLL_S = 0.02


def wait_until(condition: Callable[[], bool], what: str, *, within_s: float = EVENTUALLY_S) -> float:
    """Waits for `condition`; returns the seconds that it took. Raises AssertionError after `within_s`.

    within_s: say it only where it is a promise that is tested.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within_s:
            raise AssertionError(f"waited {within_s:g} s for {what}")
        time.sleep(_POLL_S)
    return time.monotonic() - began


async def eventually(
    condition: Callable[[], bool | Awaitable[bool]], what: str = "", *, within_s: float = EVENTUALLY_S
) -> None:
    """`wait_until` in an event loop. condition: may be a coroutine function."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        met = condition()
        if await met if inspect.isawaitable(met) else met:
            return
        if loop.time() - began > within_s:
            raise AssertionError(f"waited {within_s:g} s for {what or inspect.getsource(condition).strip()}")
        await asyncio.sleep(_POLL_S)
