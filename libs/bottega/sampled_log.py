"""Log lines that callers can cause at will: the first of a kind in a second one by one, the rest as a number.

Without this, many callers would cause so many lines that journald drops some of the service's, errors among them: it
keeps 10,000 in 30 s. Any thread may use it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping

# Of a kind, in a second: with two dozen kinds at once it stays below half of what journald takes.
LINES_PER_SECOND = 5

_SECOND_S = 1.0
# Counted apart in one second. Callers give facts of which there are only so many; beyond it all count as one kind.
_MOST_KINDS = 64

_Kind = tuple[tuple[str, str], ...]


class SampledLog:
    """One event's lines: `log_event` each of them, `sum_up` at the end; meanwhile it sums up by itself.

    log: where they go. event: what each says. more: what the line says that has the number of those that were left
    out, which its field `counted` has.
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
        """It has happened. kind: facts that are counted apart, of which there must be few. details: facts of this one
        alone. error: whose traceback the line has. The line has what is bound in this context."""
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
        """A thread of its own has nothing bound: what it writes belongs to none of those it counts.

        None where the machine has no thread left; the next line tries again.
        """
        timer = threading.Timer(_SECOND_S, self.sum_up)
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:
            return None
        return timer

    def sum_up(self) -> None:
        """Says how many more there were since the last time, a line for each kind. Harmless when there were none."""
        with self._lock:
            kinds, self._kinds = self._kinds, Counter()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        for kind, count in kinds.items():
            if count > LINES_PER_SECOND:
                self._log.log(self._level, self._more, extra={**dict(kind), self._counted: count - LINES_PER_SECOND})
