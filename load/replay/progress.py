"""A line now and then of how a run goes, for whoever watches it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from load.replay.requests import PlannedRequest
from load.replay.results import Outcome, Result

INTERVAL_S = 10.0

Send = Callable[[PlannedRequest], Awaitable[Result]]


class Progress:
    """Counts what passes through `send`. planned: requests in all."""

    def __init__(self, send: Send, planned: int) -> None:
        self._send = send
        self._planned = planned
        self._sent = 0
        self._over: Counter[Outcome] = Counter()

    async def send(self, request: PlannedRequest) -> Result:
        """Sends it, and counts."""
        self._sent += 1
        outcome = Outcome.LATE  # unless it comes to another end than its deadline
        try:
            result = await self._send(request)
            outcome = result.outcome
            return result
        finally:
            self._over[outcome] += 1

    @asynccontextmanager
    async def shown(self, interval_s: float = INTERVAL_S) -> AsyncIterator[None]:
        """Writes lines to stderr while the block runs."""
        showing = asyncio.create_task(self._show(interval_s))
        try:
            yield
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)

    async def _show(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            print(self, file=sys.stderr, flush=True)

    def __str__(self) -> str:
        ends = "".join(f", {count} {outcome}" for outcome, count in sorted(self._over.items()))
        waiting = self._sent - self._over.total()
        return f"{self._sent} of {self._planned} sent, {waiting} in flight{ends}"
