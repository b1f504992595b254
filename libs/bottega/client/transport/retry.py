"""When to try again and when to give up: plain arithmetic on time, and the error of a call whose time ran out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from bottega.client.types.events import Event, Progress
from bottega.client.types.messages import describe
from bottega.errors import BottegaError, DeadlinePassed, InvalidRequest, Unavailable, Violation

# Thirty years. gRPC takes a moment that is much further away for one that has passed.
_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How to go on when the gateway is UNAVAILABLE, or serves as many calls as it can; nothing else is ever retried.

    patience_s: give up when it was unavailable for so long. A gateway and its workers are back within
        seconds of a restart; a backend that starts together with its gateway finds it, too.
    reach_s: give up when nothing has ever answered, and that for so long; a person who forgot to start a gateway wants
        to hear that sooner than that one is still without workers, or that the one which drew is gone.
    first_wait_s, longest_wait_s: the wait doubles from one to the other, each drawn between half and all of it.
    """

    patience_s: float = 30.0
    reach_s: float = 30.0
    first_wait_s: float = 0.1
    longest_wait_s: float = 2.0


class CallTimeout(DeadlinePassed):
    """The caller's own time is over, which says nothing of the job's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDeadline:
    """The moment (time.monotonic) after which the caller no longer wants the answer.

    allowed_s: seconds that there were at first, for what is said when they are over.
    """

    at_s: float
    allowed_s: float

    @classmethod
    def after(cls, seconds: object, *, name: str = "timeout_s") -> CallDeadline:
        """The moment so many seconds from now. Raises InvalidRequest for a number that is no time to wait.

        name: of the argument that said so.
        """
        if not isinstance(seconds, int | float) or not 0 < seconds <= _LONGEST_S:
            rule = f"must be a number of seconds above 0, at most {_LONGEST_S:g}; got {describe(seconds)}"
            raise InvalidRequest(f"{name} {rule}", violations=[Violation(field=name, description=rule)])
        return cls(at_s=time.monotonic() + seconds, allowed_s=seconds)

    def remaining_s(self) -> float:
        """Seconds to go. Raises DeadlinePassed when there are none."""
        remaining_s = self.at_s - time.monotonic()
        if remaining_s <= 0:
            raise self.passed()
        return remaining_s

    def passed(self) -> CallTimeout:
        """What is raised when nothing remains."""
        return CallTimeout(f"not done within {self.allowed_s:g} s")


class Backoff:
    """The waits between the tries of one call."""

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
        """The gateway did what it was asked: start over."""
        self._tries = 0
        self._last_answer_s = self._clock()
        self._reached = True

    def wait_s(self, error: BottegaError) -> float:
        """Seconds to wait before the next try; at least what the gateway asked for.

        Raises `error` when patience or the deadline would end before that.
        """
        longest_s = min(self._policy.first_wait_s * 2**self._tries, self._policy.longest_wait_s)
        self._tries += 1
        wait_s = self._draw(longest_s / 2, longest_s)
        if error.retry_after_s is not None:
            # The jitter goes on top: callers that were told the same number must not come back at once.
            wait_s += error.retry_after_s
        self._reached |= type(error) is not Unavailable  # a reason is only given by a gateway that is there
        patience_s = self._policy.patience_s if self._reached else min(self._policy.patience_s, self._policy.reach_s)
        after_s = self._clock() + wait_s
        if after_s > self._last_answer_s + patience_s or after_s >= self._deadline.at_s:
            raise error
        return wait_s


_GOES_ON = "The job goes on: client.job({job_id!r}).stream() follows it, and .result() has its pictures."
_ENDS = "Allow more time (timeout_s), or submit() a job that outlives the call and fetch its pictures later."


@dataclass(slots=True, kw_only=True)
class LastProgress:
    """How far a job came, as its caller was told; no job_id when nothing was told."""

    job_id: str = ""
    steps_done: int = 0
    steps_total: int = 0

    def update(self, event: Event) -> None:
        """Update the job's id and its step counts from an event."""
        self.job_id = getattr(event, "job_id", self.job_id)
        if isinstance(event, Progress):
            self.steps_done, self.steps_total = event.steps_done, event.steps_total


def timeout_error(error: DeadlinePassed, last: LastProgress, *, goes_on: bool) -> DeadlinePassed:
    """The error with what is known of the job; what to do stands in its notes.

    goes_on: the job outlives its caller.
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
