"""The jobs that wait for a worker, first come first served for each model, within bounds.

Knows no workers; who takes a job, and when, is the scheduler's matter.
"""

from __future__ import annotations

import random
from collections import deque

from bottega.errors import QueueFull
from bottega.gateway.clock import Clock
from bottega.gateway.jobs import Job

# Jobs that left, over which the rate is measured, and how old they may be.
_RATE_JOBS = 32
_RATE_WINDOW_S = 60.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.5, 60.0
# A caller that comes back after this share of the queue has gone finds room beside the others who wait.
_RETRY_SHARE = 0.1
# Longest time that is asked for, over the shortest.
_SPREAD = 1.5


class JobQueue:
    """Waiting jobs by model. max_jobs, budget_bytes: bounds over all models."""

    def __init__(self, *, max_jobs: int, budget_bytes: int, clock: Clock) -> None:
        self._max_jobs = max_jobs
        self._budget_bytes = budget_bytes
        self._clock = clock
        self._lines: dict[str, deque[Job]] = {}
        self._left: deque[float] = deque(maxlen=_RATE_JOBS)
        self._bytes: dict[str, int] = {}
        self._reserved: dict[str, int] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def check_room(self, size_bytes: int) -> None:
        """Raises QueueFull, with the time after which to ask again, when no job of that size fits."""
        if len(self) + len(self._reserved) >= self._max_jobs or self._size_bytes + size_bytes > self._budget_bytes:
            raise QueueFull(f"{len(self)} jobs wait already", retry_after_s=self.retry_after_s())

    def reserve(self, job: Job) -> None:
        """Keeps room for a job until it lines up or is removed. Raises QueueFull."""
        self.check_room(job.size_bytes)
        self._reserved[job.job_id] = job.size_bytes
        self._size_bytes += job.size_bytes

    def add(self, job: Job, *, first: bool = False) -> None:
        """Lines a job up. first: before the others, for one that had its turn and was lost."""
        self._size_bytes -= self._reserved.pop(job.job_id, 0)
        line = self._lines.setdefault(job.spec.model, deque())
        if first:
            line.appendleft(job)
        else:
            line.append(job)
        self._bytes[job.job_id] = job.size_bytes
        self._size_bytes += job.size_bytes

    def remove(self, job: Job) -> None:
        """Takes a job out, if it is in, and gives up the room that was reserved for it."""
        self._size_bytes -= self._reserved.pop(job.job_id, 0)
        size = self._bytes.pop(job.job_id, None)
        if size is None:
            return
        self._size_bytes -= size
        line = self._lines[job.bare.model]
        line.remove(job)
        if not line:
            del self._lines[job.bare.model]

    def models(self) -> list[str]:
        """Models that jobs wait for."""
        return list(self._lines)

    def line(self, model: str) -> deque[Job]:
        """Jobs that wait for a model, first come first. Not to be changed."""
        return self._lines.get(model) or deque()

    def one_done(self) -> None:
        """Says that a job was drawn, for the measured rate."""
        self._left.append(self._clock.monotonic())

    def retry_after_s(self) -> float:
        """Seconds until about a tenth of the queue will have been drawn, by the measured rate.

        A little more for some than for others, so that those who were refused together do not come back together.
        """
        return random.uniform(1.0, _SPREAD) * self._due_s()

    def _due_s(self) -> float:
        now = self._clock.monotonic()
        recent = [at for at in self._left if at > now - _RATE_WINDOW_S]
        if len(recent) < 2:
            return _MIN_RETRY_S * 4
        rate = len(recent) / max(now - recent[0], 1e-3)
        return min(max(max(1.0, _RETRY_SHARE * len(self)) / rate, _MIN_RETRY_S), _MAX_RETRY_S)
