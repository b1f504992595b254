"""The jobs that the gateway remembers, in memory, within bounds. Knows nothing of how jobs are drawn."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bottega.errors import InvalidRequest, JobNotFound, Violation
from bottega.gateway.clock import Clock
from bottega.gateway.jobs import Job
from bottega.v1.image_pb2 import JobState

# Of a job beside its spec and provenance: Python objects, measured.
_JOB_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which jobs a list holds. states: empty is all. after, before: Unix seconds of acceptance."""

    states: Collection[JobState.ValueType] = ()
    after: float | None = None
    before: float | None = None

    def admits(self, job: Job) -> bool:
        """Whether the list holds the job."""
        return (
            (not self.states or job.state in self.states)
            and (self.after is None or job.created_wall >= self.after)
            and (self.before is None or job.created_wall < self.before)
        )


class JobLog:
    """Live jobs are always remembered; ended ones until their time is over or the log is full.

    ttl_s: seconds after its end that a job, and its request_id, is remembered.
    max_jobs, budget_bytes: bounds on what is remembered.
    """

    def __init__(self, *, max_jobs: int, budget_bytes: int, ttl_s: float, clock: Clock) -> None:
        self._max_jobs = max_jobs
        self._budget_bytes = budget_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._by_request_id: dict[str, Job] = {}
        self._ended: deque[Job] = deque()
        self._sequence = itertools.count(1)
        self._sizes: dict[str, int] = {}
        self.size_bytes = 0

    def add(self, job: Job) -> None:
        """Remembers a new job; its request_id from now on means this one."""
        job.sequence = next(self._sequence)
        self._jobs[job.job_id] = job
        if job.request_id:
            self._by_request_id[job.request_id] = job
        self._account(job)

    def ended(self, job: Job) -> None:
        """Says that a job has ended, so that it may be forgotten one day."""
        self._account(job)
        self._ended.append(job)
        self.sweep()

    def get(self, job_id: str) -> Job:
        """The job. Raises JobNotFound."""
        job = self._jobs.get(job_id)
        if job is None:
            raise JobNotFound("no such job; it may have expired")
        return job

    def find(self, job_id: str) -> Job | None:
        """The job, or None."""
        return self._jobs.get(job_id)

    def of_request(self, request_id: str) -> Job | None:
        """The newest job of an idempotency key, or None."""
        return self._by_request_id.get(request_id)

    def live(self) -> Iterator[Job]:
        """Jobs that have not ended."""
        return (job for job in self._jobs.values() if job.live)

    def page(self, filter_: Filter, *, size: int, token: str) -> tuple[list[Job], str]:
        """Up to `size` jobs, newest first, and the token of the next page ("" on the last).

        Raises InvalidRequest for a token that was not given out.
        """
        newest = _sequence_of(token) if token else None
        jobs = (job for job in reversed(self._jobs.values()) if newest is None or job.sequence < newest)
        found = list(itertools.islice((job for job in jobs if filter_.admits(job)), size + 1))
        return found[:size], _token_of(found[size - 1]) if len(found) > size else ""

    def sweep(self) -> None:
        """Forgets jobs whose time is over, and the oldest ones beyond the bounds."""
        oldest = self._clock.monotonic() - self._ttl_s
        while self._ended and (self._full() or (self._ended[0].ended_at or 0.0) <= oldest):
            self._forget(self._ended.popleft())

    def _full(self) -> bool:
        return len(self._jobs) > self._max_jobs or self.size_bytes > self._budget_bytes

    def _forget(self, job: Job) -> None:
        del self._jobs[job.job_id]
        self.size_bytes -= self._sizes.pop(job.job_id)
        if self._by_request_id.get(job.request_id) is job:
            del self._by_request_id[job.request_id]

    def _account(self, job: Job) -> None:
        size = _JOB_BYTES + job.bare.ByteSize() + (job.provenance.ByteSize() if job.provenance else 0)
        self.size_bytes += size - self._sizes.get(job.job_id, 0)
        self._sizes[job.job_id] = size


def _token_of(job: Job) -> str:
    return base64.urlsafe_b64encode(job.sequence.to_bytes(8, "big")).decode()


def _sequence_of(token: str) -> int:
    try:
        raw = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != 8:
        rule = "must be the next_page_token of an earlier answer"
        raise InvalidRequest(f"page_token: {rule}", violations=[Violation(field="page_token", description=rule)])
    return int.from_bytes(raw, "big")
