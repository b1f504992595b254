"""Refused calls in the log: the first of a kind one by one, the rest of a second as a number. See sampled_log."""

from __future__ import annotations

import logging

from bottega.sampled_log import SampledLog

_log = logging.getLogger(__name__)


class CallErrorLog:
    """`sum_up` at the end, else it does so itself."""

    def __init__(self) -> None:
        self._refusals = SampledLog(_log, "call refused", more="more calls refused", counted="calls")
        self._unexpected = _faults("call failed unexpectedly")
        self._expected = _faults("call failed")

    def refused(self, method: str, reason: str, text: str) -> None:
        """A call was refused. The line has what is bound for that call."""
        self._refusals.log_event({"method": method, "reason": reason}, {"text": text})

    def failed(self, method: str, error: Exception, *, expected: bool) -> None:
        """A call failed by a fault of ours, which a caller can repeat as often as it likes.

        expected: whether it is an error that was raised on purpose.
        """
        (self._expected if expected else self._unexpected).log_event({"method": method}, error=error)

    def sum_up(self) -> None:
        """Says how many more there were since the last time, a line for each kind. Harmless when there were none."""
        for lines in (self._refusals, self._unexpected, self._expected):
            lines.sum_up()


def _faults(event: str) -> SampledLog:
    return SampledLog(_log, event, more=f"more times: {event}", counted="calls", level=logging.ERROR)
