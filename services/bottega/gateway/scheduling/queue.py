"""The jobs that wait for a worker: a queue for each model that tenants share fairly, and bounds over all models."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence

from bottega.clocks import Clock
from bottega.errors import QueueFull
from bottega.fair_order import fair_room
from bottega.gateway.jobs.job import Job
from bottega.gateway.scheduling.line import DuePolicy, JobSizes, Line
from bottega.gateway.tenants import TenantTerms

# The rate is measured over the completed jobs of this window, at most so many. The newest few count whatever their age,
# because a picture may take minutes.
_RATE_JOBS, _MIN_RATE_JOBS = 32, 4
_RATE_WINDOW_S = 60.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.5, 60.0
# A caller that retries after this share of the queue was served finds a place even if other callers retry too.
_RETRY_SHARE = 0.1
# Ratio of the longest to the shortest suggested time until a retry.
_SPREAD = 1.5
# Share of the queue that a tenant may use while no other tenant has jobs in it.
_TENANT_SHARE = 0.75


class JobQueue:
    """The jobs that wait for a worker, by model.

    Args:
        max_jobs: Upper bound on the number of jobs of all models.
        budget_bytes: Upper bound on the total bytes of their requests.
        clock: Clock of the gateway.
        terms: Weights and quotas of tenants; None gives all tenants the same weight.
        due: The rule that says when jobs are due, see Line.
        sizes: Estimates how long jobs take; None counts all jobs as equally long.
    """

    def __init__(
        self,
        *,
        max_jobs: int,
        budget_bytes: int,
        clock: Clock,
        terms: TenantTerms | None = None,
        due: DuePolicy | None = None,
        sizes: JobSizes | None = None,
    ) -> None:
        self.terms = terms or TenantTerms()
        self._sizes = sizes
        self._max_jobs = max_jobs
        self._budget_bytes = budget_bytes
        self._due = due or DuePolicy()
        self._clock = clock
        self._lines: dict[str, Line] = {}
        self._completed_at: deque[float] = deque(maxlen=_RATE_JOBS)
        self._waited_for_since = clock.monotonic()
        self._held = Counter[str]()
        self._held_bytes = Counter[str]()
        self._bytes: dict[str, int] = {}
        self._reserved: dict[str, int] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._bytes)

    def held(self, tenant: str) -> int:
        """Return the number of a tenant's jobs that wait or have a reserved place."""
        return self._held[tenant]

    def held_by_tenant(self) -> Mapping[str, int]:
        """Return `held` for all tenants that hold places. Any thread may call it."""
        return dict(self._held)

    def check_room(self, size_bytes: int, *, tenant: str = "") -> None:
        """Raise QueueFull, with the time to retry, if the queue has no place or bytes for another job of that size.

        A named tenant gets only a part of the free places and bytes, so that some are left for others; see `fair_room`.
        """
        free, free_bytes = self._max_jobs - len(self) - len(self._reserved), self._budget_bytes - self._size_bytes
        if free < 1 or size_bytes > free_bytes:
            raise QueueFull(f"the queue is full: {len(self)} jobs wait already", retry_after_s=self.retry_after_s())
        if not tenant:
            return
        held = self._held[tenant]
        room_bytes = fair_room(free=free_bytes, held=self._held_bytes[tenant], share=_TENANT_SHARE)
        if fair_room(free=free, held=held, share=_TENANT_SHARE) <= 0 or (held and size_bytes > room_bytes):
            raise QueueFull(
                f"{held} of your jobs are in the queue already; the remaining places are for other tenants",
                retry_after_s=self.retry_after_s(),
            )

    def reserve(self, job: Job) -> None:
        """Reserve a place and the request bytes of a job until it is added or removed. Raises QueueFull."""
        self.check_room(job.request.size_bytes, tenant=job.request.tenant)
        self._reserved[job.job_id] = job.request.size_bytes
        self._hold(job)

    def add(self, job: Job, *, first: bool = False) -> None:
        """Add a job. With `first`, it goes before all others, because its attempt was lost while it ran."""
        self._release(job)
        if not self._bytes:
            self._skip_idleness()
        line = self._line_of(job.spec.model)
        if first:
            line.add_first(job)
        else:
            line.add(job)
        self._bytes[job.job_id] = job.request.size_bytes
        self._hold(job)

    def remove(self, job: Job) -> None:
        """Remove a job if it is in the queue, and release what was reserved for it."""
        self._release(job)
        size = self._bytes.pop(job.job_id, None)
        if size is None:
            return
        self._unhold(job.request.tenant, size)
        self._lines[job.bare.model].remove(job)
        self._drop_if_idle(job.bare.model)

    def begin(self, job: Job) -> None:
        """Remove a job that starts now. Charge its tenant the expected seconds, until `settle` corrects them."""
        self._lines[job.bare.model].begin(job)
        self.remove(job)

    def settle(self, job: Job, device_s: float | None) -> None:
        """Charge a job's tenant the device seconds that an attempt took; None if unknown."""
        self._line_of(job.bare.model).settle(job, device_s)
        self._drop_if_idle(job.bare.model)

    def models(self) -> list[str]:
        """Return the models for which jobs wait."""
        return [model for model, line in self._lines.items() if line]

    def waiting(self, model: str) -> int:
        """Return the number of jobs that wait for a model."""
        line = self._lines.get(model)
        return 0 if line is None else len(line)

    def line(self, model: str) -> Iterator[Job]:
        """Iterate over the jobs that wait for a model, in the order in which they are served.

        The iteration does not see jobs that are added or removed meanwhile.
        """
        return iter(self._lines.get(model, ()))

    def unordered(self, model: str) -> Collection[Job]:
        """Return the jobs that wait for a model, in no particular order."""
        line = self._lines.get(model)
        return () if line is None else line.unordered

    def tenants(self, model: str) -> Collection[str]:
        """Return the tenants whose jobs wait for a model."""
        line = self._lines.get(model)
        return () if line is None else line.tenants

    def place(self, job: Job) -> int:
        """Return how many jobs of its model are served before a waiting job."""
        return self._lines[job.bare.model].place(job)

    def before(self, job: Job) -> Sequence[Job]:
        """Return the jobs of its model that are served before a job, or would be if it were added now."""
        line = self._lines.get(job.bare.model)
        return () if line is None else line.before(job)

    def longest_wait_s(self) -> float:
        """Return the longest time in seconds that a waiting job has waited; 0 if none waits. Any thread may call it.

        A job whose attempt was lost waits since then.
        """
        queued_at = (job.times.queued_at for line in list(self._lines.values()) for job in list(line.unordered))
        now = self._clock.monotonic()
        return now - min(queued_at, default=now)

    def count_completed(self) -> None:
        """Count a completed job, to measure the rate at which jobs complete."""
        self._completed_at.append(self._clock.monotonic())

    def retry_after_s(self) -> float:
        """Return the seconds until about a tenth of the queue has been served, at the measured rate.

        The time varies at random, so that callers that were refused together do not retry together.
        """
        return random.uniform(1.0, _SPREAD) * self._due_s()

    def _line_of(self, model: str) -> Line:
        line = self._lines.get(model)
        if line is None:
            line = self._lines[model] = Line(self.terms.weight, self._due, self._sizes)
        return line

    def _drop_if_idle(self, model: str) -> None:
        if self._lines[model].idle:
            del self._lines[model]

    def _release(self, job: Job) -> None:
        size = self._reserved.pop(job.job_id, None)
        if size is not None:
            self._unhold(job.request.tenant, size)

    def _hold(self, job: Job) -> None:
        tenant, size_bytes = job.request.tenant, job.request.size_bytes
        self._held[tenant] += 1
        self._held_bytes[tenant] += size_bytes
        self._size_bytes += size_bytes

    def _unhold(self, tenant: str, size_bytes: int) -> None:
        self._size_bytes -= size_bytes
        self._held[tenant] -= 1
        self._held_bytes[tenant] -= size_bytes
        if not self._held[tenant]:
            del self._held[tenant], self._held_bytes[tenant]

    def _skip_idleness(self) -> None:
        """Shift the times of completed jobs, so that a long idle period does not lower the rate."""
        now = self._waited_for_since = self._clock.monotonic()
        idle_s = now - self._completed_at[-1] if self._completed_at else 0.0
        if idle_s > _RATE_WINDOW_S:
            self._completed_at = deque((at + idle_s for at in self._completed_at), maxlen=_RATE_JOBS)

    def _due_s(self) -> float:
        if len(self._completed_at) < 2:
            return _MIN_RETRY_S * 4
        return min(max(max(1.0, _RETRY_SHARE * len(self)) / self._rate(), _MIN_RETRY_S), _MAX_RETRY_S)

    def _rate(self) -> float:
        """Return completed jobs per second. The time since the last one counts, so the rate falls in a stall."""
        now = self._clock.monotonic()
        recent = sum(at > now - _RATE_WINDOW_S for at in self._completed_at)
        ends = list(self._completed_at)[-max(recent, _MIN_RATE_JOBS) :]
        took_s = ends[-1] - ends[0]
        # Idle periods do not count.
        silent_s = now - max(ends[-1], self._waited_for_since)
        return min((len(ends) - 1) / max(took_s, 1e-3), len(ends) / max(took_s + silent_s, 1e-3))
