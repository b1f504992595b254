"""The results of a run's requests, and what can be concluded from them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from hdrh.histogram import HdrHistogram

# What goes out later than so after its time was not offered when it was planned. A loop on busy cores is some tens of
# milliseconds late; pictures take longer than this.
LATEST_SEND_S = 0.1
LEAST_OF_OFFERED = 0.99
LONGEST_S = 3600.0
# A microsecond to an hour, exact to three digits.
_UNITS_PER_S = 1e6
_DIGITS = 3


class Timed(Protocol):
    """A request that has a time."""

    @property
    def at_s(self) -> float:
        """The seconds from the beginning of the run."""
        ...


RequestT = TypeVar("RequestT", bound=Timed)


class Outcome(StrEnum):
    """A request's end. UNSENT never went out, as too many were in flight or the run was stopped."""

    ANSWERED = "answered"
    REFUSED = "refused"
    LATE = "late"
    FAILED = "failed"
    UNSENT = "unsent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A sender's result of a request."""

    outcome: Outcome = Outcome.ANSWERED
    reason: str = ""
    """Why it was not answered, such as an error's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Generic[RequestT]):
    """A request and its end."""

    request: RequestT
    outcome: Outcome
    reason: str
    latency_s: float
    """Seconds from when it was meant to go out to its result; NaN of one that never did."""
    delay_s: float
    """Seconds by which it went out too late; NaN of one that never did."""

    @property
    def on_time(self) -> bool:
        """Whether it went out when it was planned to."""
        return self.delay_s <= LATEST_SEND_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay(Generic[RequestT]):
    """The result of a run."""

    latencies: HdrHistogram
    """Microseconds of answered requests, and the deadline of late ones, which they took at least; no others."""
    outcomes: Counter[Outcome]
    reasons: Counter[tuple[Outcome, str]]
    """Counts of those that were not answered, by outcome and reason."""
    offered_rate: float
    """Requests a second that were planned."""
    achieved_rate: float
    """Requests a second that went out on time."""
    void: str | None
    """Why nothing can be concluded from the run, or None."""
    answers: tuple[Answer[RequestT], ...]
    """One for each request of the plan."""

    def latency_s(self, percentile: float) -> float:
        """Return a percentile, 0 to 100; NaN where none was answered or late."""
        return percentile_s(self.latencies, percentile)

    def took_s(self) -> list[float]:
        """Return the latencies of all requests, as planned.

        Raises RuntimeError for a void run, or where a request was not answered.
        """
        if self.void:
            raise RuntimeError(self.void)
        if unanswered := len(self.answers) - self.outcomes[Outcome.ANSWERED]:
            why = ", ".join(f"{count} {outcome} ({reason})" for (outcome, reason), count in self.reasons.items())
            raise RuntimeError(f"{unanswered} of {len(self.answers)} requests were not answered: {why}")
        return [answer.latency_s for answer in self.answers]


def new_histogram() -> HdrHistogram:
    """Return a histogram of microseconds, up to LONGEST_S; those of several runs can be added to each other."""
    return HdrHistogram(1, int(LONGEST_S * _UNITS_PER_S), _DIGITS)


def record_s(histogram: HdrHistogram, seconds: float) -> None:
    """Add a value. Raises ValueError for more than LONGEST_S."""
    if not histogram.record_value(max(1, round(seconds * _UNITS_PER_S))):
        raise ValueError(f"{seconds:g} s is more than the histogram's {LONGEST_S:g} s")


def percentile_s(histogram: HdrHistogram, percentile: float) -> float:
    """Return a percentile, 0 to 100; NaN where the histogram is empty."""
    if not histogram.get_total_count():
        return math.nan
    return float(histogram.get_value_at_percentile(percentile)) / _UNITS_PER_S


def concluded(answers: Sequence[Answer[RequestT]], *, deadline_s: float, length_s: float) -> Replay[RequestT]:
    """Return the result of a run of that length with these answers, one for each request that was planned."""
    latencies = new_histogram()
    for answer in answers:
        if answer.outcome is Outcome.ANSWERED:
            record_s(latencies, min(answer.latency_s, deadline_s))
        elif answer.outcome is Outcome.LATE:
            record_s(latencies, deadline_s)
    failed = [answer for answer in answers if answer.outcome is not Outcome.ANSWERED]
    # A run that is over at once has no rate that means something.
    length_s = max(length_s, 1.0)
    return Replay(
        latencies=latencies,
        outcomes=Counter(answer.outcome for answer in answers),
        reasons=Counter((answer.outcome, answer.reason) for answer in failed),
        offered_rate=len(answers) / length_s,
        achieved_rate=sum(answer.on_time for answer in answers) / length_s,
        void=_void(answers),
        answers=tuple(answers),
    )


def _void(answers: Sequence[Answer[RequestT]]) -> str | None:
    """Return why the run is void, or None."""
    on_time = sum(answer.on_time for answer in answers)
    if on_time >= LEAST_OF_OFFERED * len(answers):
        return None
    reasons = []
    delays_s = [answer.delay_s for answer in answers if answer.delay_s > LATEST_SEND_S]
    if delays_s:
        reasons.append(f"{len(delays_s)} went out more than {LATEST_SEND_S:g} s late, up to {max(delays_s):.1f} s")
    unsent = Counter(answer.reason for answer in answers if answer.outcome is Outcome.UNSENT)
    reasons += [f"{count} were not sent: {reason}" for reason, count in unsent.items()]
    return (
        f"void: {on_time} of {len(answers)} requests went out on time, where it takes {LEAST_OF_OFFERED:.0%}; "
        + ", and ".join(reasons)
    )
