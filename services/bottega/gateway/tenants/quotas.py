"""Quotas of tenants. They are checked before a job is accepted, so that a refused one costs nothing."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from bottega.clocks import Clock
from bottega.errors import QuotaExceeded
from bottega.gateway.jobs.store import TenantUsage
from bottega.rpc.security.quotas import UNBOUNDED, Quotas

_MINUTE_S, _DAY_S = 60.0, 86_400
# Pictures go with their jobs, at a time that cannot be predicted.
_STORED_RETRY_S = 60.0

ReadUsage = Callable[[str], Awaitable[TenantUsage]]


class TenantTerms:
    """The weights and quotas of tenants: here those of a gateway without a file of tenants, equal and unbounded."""

    def weight(self, tenant: str) -> float:
        """Return the tenant's weight among tenants whose jobs wait, above 0."""
        del tenant
        return 1.0

    def quotas(self, tenant: str) -> Quotas:
        """Return the quotas of a tenant."""
        del tenant
        return UNBOUNDED


class Admittance:
    """The place of a new job among those of its tenant that are being admitted, for as long as it is held.

    The job's caller holds it, and so does the task that stores the job, which goes on when the caller leaves.
    """

    def __init__(self, *, begin: Callable[[], None], leave: Callable[[], None]) -> None:
        self._begin = begin
        self._leave = leave
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the place while the block runs."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._leave()

    def count(self) -> None:
        """Count the job, which is stored, as a new one of its tenant."""
        self._begin()


class QuotaLedger:
    """A ledger that counts the jobs of each tenant and compares them with its quotas.

    Args:
        terms: The quotas of tenants.
        waiting: Returns the number of a tenant's jobs that wait.
        usage: Reads a tenant's jobs and bytes in the store.
        retry_s: Returns the estimated seconds until a waiting job begins.
    """

    def __init__(
        self,
        *,
        terms: TenantTerms,
        waiting: Callable[[str], int],
        usage: ReadUsage,
        retry_s: Callable[[], float],
        clock: Clock,
    ) -> None:
        self._terms = terms
        self._waiting = waiting
        self._usage = usage
        self._retry_s = retry_s
        self._clock = clock
        self._begun: dict[str, deque[float]] = {}
        self._admitting = Counter[str]()

    @asynccontextmanager
    async def admitting(self, tenant: str) -> AsyncIterator[Admittance]:
        """Admit a new job of a tenant in the block, in which `Admittance.count` notes that it is stored.

        Raises QuotaExceeded.
        """
        quotas = self._terms.quotas(tenant)
        if quotas == UNBOUNDED:
            yield Admittance(begin=_do_nothing, leave=_do_nothing)
            return
        self._admitting[tenant] += 1
        place = Admittance(
            begin=functools.partial(self._begin, tenant, quotas), leave=functools.partial(self._leave, tenant)
        )
        with place.held():
            await self._check(tenant, quotas)
            yield place

    def _begin(self, tenant: str, quotas: Quotas) -> None:
        if quotas.per_minute:
            self._begun.setdefault(tenant, deque()).append(self._clock.monotonic())

    def _leave(self, tenant: str) -> None:
        self._admitting[tenant] -= 1
        if not self._admitting[tenant]:
            del self._admitting[tenant]

    async def _check(self, tenant: str, quotas: Quotas) -> None:
        others = self._admitting[tenant] - 1
        if quotas.queued and self._waiting(tenant) + others >= quotas.queued:
            raise _exceeded("queued", quotas.queued, "jobs of yours wait", self._retry_s())
        recent = self._recent(tenant)
        if quotas.per_minute and len(recent) + others >= quotas.per_minute:
            left_s = recent[0] + _MINUTE_S - self._clock.monotonic() if recent else 1.0
            raise _exceeded("per_minute", quotas.per_minute, "jobs of yours began in the last minute", left_s)
        if not (quotas.per_day or quotas.stored_bytes):
            return
        usage = await self._usage(tenant)
        if quotas.per_day and usage.jobs_today + others >= quotas.per_day:
            left_s = _DAY_S - self._clock.wall() % _DAY_S
            raise _exceeded("per_day", quotas.per_day, "jobs of yours began today, by UTC", left_s)
        if quotas.stored_bytes and usage.stored_bytes >= quotas.stored_bytes:
            raise _exceeded("stored_bytes", quotas.stored_bytes, "bytes of your pictures are stored", _STORED_RETRY_S)

    def _recent(self, tenant: str) -> deque[float]:
        begun = self._begun.get(tenant, deque())
        while begun and begun[0] <= self._clock.monotonic() - _MINUTE_S:
            begun.popleft()
        if not begun:
            self._begun.pop(tenant, None)
        return begun


def _do_nothing() -> None:
    """Count nothing: nothing is bounded."""


def _exceeded(quota: str, most: int, what: str, retry_after_s: float) -> QuotaExceeded:
    return QuotaExceeded(
        f"as many {what} as you may have: {most}",
        metadata={"quota": quota, "most": str(most)},
        retry_after_s=max(0.1, retry_after_s),
    )
