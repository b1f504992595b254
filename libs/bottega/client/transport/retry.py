"""Rules of retries: waits, deadlines, and the error of a call whose time ran out. It only computes with times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from bottega.client.types.events import Event, Progress
from bottega.client.types.messages import describe
from bottega.errors import BottegaError, DeadlinePassed, InvalidRequest, Unavailable, Violation

# Thirty years. gRPC takes a much later moment for one that has passed.
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The rules of retries while the gateway is UNAVAILABLE or busy; other errors are not retried."""

    patience_s: float = 30.0
    """Seconds of unavailability after which to give up. A gateway and its workers restart within seconds."""
    reach_s: float = 30.0
    """Seconds after which to give up if nothing has ever answered. For people this may be shorter than `patience_s`:
    they may have forgotten to start a gateway."""
    first_wait_s: float = 0.1
    """Longest wait before the first retry; it doubles with every retry. Each wait is random, at least half of it."""
    longest_wait_s: float = 2.0


class CallTimeout(DeadlinePassed):
    """An error: the caller's own timeout has passed. The job may go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeadline:
    """The moment after which the caller no longer wants the answer."""

    at_s: float
    """By time.monotonic()."""
    allowed_s: float
    """Seconds that the call had at first, for error messages."""

    @classmethod
    def after(cls, seconds: object, *, name: str = "timeout_s") -> CallDeadline:
        """Return the deadline that is `seconds` away. Raise InvalidRequest if they are invalid.

        Args:
            seconds: The argument that a caller gave.
            name: The name of that argument.
        """
        if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_S:
            rule = f"must be a number of seconds above 0, at most {_LONGEST_S:g}; got {describe(seconds)}"
            raise InvalidRequest(f"{name} {rule}", violations=[Violation(field=name, description=rule)])
        return cls(at_s=time.monotonic() + seconds, allowed_s=seconds)

    def remaining_s(self) -> float:
        """Return the seconds that remain. Raise CallTimeout if none do."""
        remaining_s = self.at_s - time.monotonic()
        if remaining_s <= 0:
            raise self.passed()
        return remaining_s

    def passed(self) -> CallTimeout:
        """Return the error of a call whose deadline has passed."""
        return CallTimeout(f"not done within {self.allowed_s:g} s")


class Backoff:
    """A generator of the waits between the tries of one call."""

    def __init__(
        self,
        policy: RetryPolicy,
        deadline: CallDeadline,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._policy = policy
        self._deadline = deadline
        self._clock = clock
        self._draw = draw
        self._tries = 0
        self._last_answer_s = self._clock()
        self._reached = False

    def reset(self) -> None:
        """Reset the waits and the patience, because the gateway has served the call."""
        self._tries = 0
        self._last_answer_s = self._clock()
        self._reached = True

    def wait_s(self, error: BottegaError) -> float:
        """Return the seconds to wait before the next try; at least as many as the gateway asked for.

        Raises `error` if the patience or the deadline would end before that.
        """
        longest_s = min(self._policy.first_wait_s * 2**self._tries, self._policy.longest_wait_s)
        self._tries += 1
        wait_s = self._draw(longest_s / 2, longest_s)
        if error.retry_after_s is not None:
            # Plus a random time, so that callers that got the same number do not retry at the same moment.
            wait_s += error.retry_after_s
        self._reached |= type(error) is not Unavailable  # only a running gateway gives a reason
        patience_s = self._policy.patience_s if self._reached else min(self._policy.patience_s, self._policy.reach_s)
        after_s = self._clock() + wait_s
        if after_s > self._last_answer_s + patience_s or after_s >= self._deadline.at_s:
            raise error
        return wait_s


_GOES_ON = "The job goes on: client.job({job_id!r}).stream() follows it, and .result() has its pictures."
_ENDS = "Allow more time (timeout_s), or submit() a job, which outlives the call, and fetch its pictures later."


@dataclass(slots=True, kw_only=True)
class LastProgress:
    """The progress of a job as its caller knows it; without a job_id if there was no event."""

    job_id: str = ""
    steps_done: int = 0
    steps_total: int = 0

    def update(self, event: Event) -> None:
        """Update the job's id and its step counts from an event."""
        self.job_id = getattr(event, "job_id", self.job_id)
        if isinstance(event, Progress):
            self.steps_done, self.steps_total = event.steps_done, event.steps_total


def timeout_error(error: DeadlinePassed, last: LastProgress, *, goes_on: bool) -> DeadlinePassed:
    """Return an error that tells the job's progress, with advice in its notes.

    Args:
        error: The error of the call.
        last: The job's progress.
        goes_on: Whether the job outlives its caller.
    """
    if not last.job_id:
        return error
    steps = f"{last.steps_done} of {last.steps_total} steps were done" if last.steps_total else "no step was done"
    state = "goes on" if goes_on else "is cancelled"
    error = CallTimeout(
        f"{error.message}: {steps}, and job {last.job_id} {state}",
        metadata={**error.metadata, "job_id": last.job_id, "steps_done": str(last.steps_done)},
    )
    error.add_note(_GOES_ON.format(job_id=last.job_id) if goes_on else _ENDS)
    return error
