"""A sampled log, for lines that callers can cause as often as they like.

It writes the first lines of a kind in each second, and one line with the number of the others. Otherwise callers could
cause so many lines that journald, which keeps 10,000 in 30 s, drops the service's errors. It is thread-safe.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

# Lines of one kind per second: two dozen kinds at once stay below half of what journald keeps.
LINES_PER_SECOND = 5

_SECOND_S = 1.0
# Kinds that are counted separately in one second; all further ones count as one.
_MOST_KINDS = 64

_Kind = tuple[tuple[str, str], ...]


class SampledLog:
    """The log of one event. Call `log_event` each time, and `sum_up` at the end; in between it sums up by itself.

    Args:
        event: Text of a line.
        more: Text of the line that says how many lines were suppressed.
        counted: Field of that line which has the number.
    """

    def __init__(
        self, log: logging.Logger, event: str, *, more: str, counted: str = "lines", level: int = logging.INFO
    ) -> None:
        self._log = log
        self._event = event
        self._more = more
        self._counted = counted
        self._level = level
        self._lock = threading.Lock()
        self._kinds: Counter[_Kind] = Counter()  # of this second
        self._timer: threading.Timer | None = None

    def log_event(
        self,
        kind: Mapping[str, str] | None = None,
        details: Mapping[str, object] | None = None,
        *,
        error: BaseException | None = None,
    ) -> None:
        """Log the event, or count it. The line has the fields that are bound in this context.

        Args:
            kind: Fields by whose values events are counted separately. They must have few values.
            details: Fields of this event alone.
            error: Error whose traceback is logged.
        """
        facts = tuple((kind or {}).items())
        with self._lock:
            if facts not in self._kinds and len(self._kinds) >= _MOST_KINDS:
                facts = ()
            self._kinds[facts] += 1
            logged = self._kinds[facts] <= LINES_PER_SECOND
            if self._timer is None:
                self._timer = self._begun_timer()
        if logged:
            self._log.log(self._level, self._event, exc_info=error, extra={**dict(facts), **(details or {})})

    def _begun_timer(self) -> threading.Timer | None:
        """Start and return a timer that sums up after a second; None if the machine has no thread left.

        Its thread has no bound fields, because the sum does not belong to one call.
        """
        timer = threading.Timer(_SECOND_S, self.sum_up)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:
            return None
        return timer

    def sum_up(self) -> None:
        """Write, for each kind, how many lines were suppressed since the last call, if any were."""
        with self._lock:
            kinds, self._kinds = self._kinds, Counter()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for kind, count in kinds.items():
            if count > LINES_PER_SECOND:
                self._log.log(self._level, self._more, extra={**dict(kind), self._counted: count - LINES_PER_SECOND})
