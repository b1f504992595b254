"""The deadlines of jobs: calls back when one passes, and says whether one has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bottega.clocks import Clock
from bottega.gateway.jobs.job import Job

# A caller's clock and ours agree on a deadline up to the time on the wire, and gRPC rounds.
_AT_DEADLINE_S = 0.1


class Deadlines:
    """Timers of the jobs that have a deadline."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def watch(self, job: Job, on_passed: Callable[[Job], None]) -> None:
        """Calls on_passed with the job when the deadline that it has now, if any, has passed."""
        self.unwatch(job)
        if job.deadline is not None:
            left_s = max(0.0, job.deadline - self._clock.monotonic())
            self._timers[job.job_id] = asyncio.get_running_loop().call_later(left_s, on_passed, job)

    def unwatch(self, job: Job) -> None:
        """The job's deadline does not matter any more."""
        timer = self._timers.pop(job.job_id, None)
        if timer is not None:
            timer.cancel()

    def has_passed(self, job: Job) -> bool:
        """Whether its deadline has passed, as far as two clocks can agree."""
        return job.deadline is not None and self._clock.monotonic() > job.deadline - _AT_DEADLINE_S

    def close(self) -> None:
        """Stops all timers."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
