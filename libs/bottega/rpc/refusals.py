"""Refused calls in the log: the first of a kind one by one, the rest of a second as a number.

A crowd that is refused would else write so many lines that journald drops some of the service's, errors among them:
it takes 10,000 in 30 s. It knows no calls, and a kind is a method and a reason, of which there are only so many.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextvars import Context

# Of a kind, in a second: with two dozen kinds at once it stays below half of what journald takes.
TOLD_PER_SECOND = 5

_SECOND_S = 1.0

_log = logging.getLogger(__name__)


class RefusalLog:
    """`tell` it every refusal, in the event loop; `sum_up` at the end, else it does so itself."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()  # of this second
        self._timer: asyncio.TimerHandle | None = None

    def tell(self, method: str, reason: str, text: str) -> None:
        """A call was refused. The line has what is bound for that call."""
        if self._timer is None:
            # What it will write belongs to no call, and so must not have the fields of this one.
            self._timer = asyncio.get_running_loop().call_later(_SECOND_S, self.sum_up, context=Context())
        self._calls[method, reason] += 1
        if self._calls[method, reason] <= TOLD_PER_SECOND:
            _log.info("call refused", extra={"method": method, "reason": reason, "text": text})

    def sum_up(self) -> None:
        """Says how many more there were since the last time, a line for each kind. Harmless when there were none."""
        calls, self._calls = self._calls, Counter()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for (method, reason), count in calls.items():
            if count > TOLD_PER_SECOND:
                facts = {"method": method, "reason": reason, "calls": count - TOLD_PER_SECOND}
                _log.info("more calls refused", extra=facts)
