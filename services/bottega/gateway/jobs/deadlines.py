"""The deadlines of jobs: who is told when one passes, and whether it is about to. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bottega.gateway.clock import Clock
from bottega.gateway.jobs.job import Job

# A caller's clock and ours agree on a deadline up to the time on the wire, and gRPC rounds.
_AT_DEADLINE_S = 0.1


def _ignore(_: Job) -> None:
    """Until somebody wants to know."""


class Deadlines:
    """on_passed: called with a job when its deadline has passed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self.on_passed: Callable[[Job], None] = _ignore

    def watch(self, job: Job) -> None:
        """Its deadline, where it has one, is as it says now."""
        self.forget(job)
        if job.deadline is not None:
            left_s = max(0.0, job.deadline - self._clock.monotonic())
            self._timers[job.job_id] = asyncio.get_running_loop().call_later(left_s, self._pass, job)

    def forget(self, job: Job) -> None:
        """Its deadline is of no matter any more."""
        timer = self._timers.pop(job.job_id, None)
        if timer is not None:
            timer.cancel()

    def reached(self, job: Job) -> bool:
        """Whether its deadline has passed, as far as two clocks can agree."""
        return job.deadline is not None and self._clock.monotonic() > job.deadline - _AT_DEADLINE_S

    def close(self) -> None:
        """Watches none."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _pass(self, job: Job) -> None:
        self.on_passed(job)
