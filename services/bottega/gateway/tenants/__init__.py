"""Tenants: the callers of the public port, known by API key, with their weights and quotas.

Keys come from the file of tenants, which is read again when it changes, so that rotated and disabled keys end at once.
Quotas are checked before a job is accepted, so that a refused one costs nothing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bottega.clocks import Clock
from bottega.errors import ConfigError, QuotaExceeded, Unauthenticated
from bottega.gateway.jobs.store import TenantUsage
from bottega.rpc.security.api_keys import hashed, matches, parse_key, shown_key
from bottega.rpc.security.caller import Caller, Metadata, Role, caller_in
from bottega.rpc.security.private_files import file_state
from bottega.rpc.security.quotas import UNBOUNDED, Quotas
from bottega.rpc.security.tenant_file import Tenant, read_tenants

# Time between two checks of the file, which take microseconds.
_LOOK_S = 1.0
_NO_KEY = (
    "this gateway asks for an API key: BOTTEGA_API_KEY, Client(api_key=...), or metadata `authorization: Bearer KEY`"
)
# The same text for everything that may be wrong: guessing keys tells nothing about existing ones.
_WRONG_KEY = "the API key is not known: it is no key of this gateway, was replaced, or its tenant is disabled"
_WRONG_TENANT = "the certificate is of no tenant of this gateway, or of one that is disabled: see bottega tenants list"

_log = logging.getLogger(__name__)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownKey:
    caller: Caller
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """The contents of the file of tenants."""

    keys: Mapping[str, _KnownKey]
    """Keys of tenants that are not disabled, by ID."""
    callers: Mapping[str, Caller]
    """Callers of tenants that are not disabled, by name."""
    tenants: Mapping[str, Tenant]
    """All tenants, by name."""


# Stands in for an unknown ID, so that it takes as much work as a known one.
_NOBODY = _KnownKey(caller=Caller(role=Role.TENANT), hash=hashed(secrets.token_hex(32)))


class TenantAuthenticator(TenantTerms):
    """A CallAuthenticator of the tenants in a file, with their terms. Raises ConfigError if the file cannot be used.

    If a later version of the file cannot be used, the last good one stays in force.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._state = file_state(path)
        self._known = _known_of(path)
        self._looked_at = clock.monotonic()
        self._reading = asyncio.Lock()

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return the caller that the certificate names, else the tenant of the key. Raises Unauthenticated."""
        if self._clock.monotonic() - self._looked_at >= _LOOK_S:
            await self._look()
        named = caller_in(identities)
        if named is not None and named.role is not Role.TENANT:
            return named
        if named is not None:
            if named.tenant not in self._known.callers:
                raise Unauthenticated(_WRONG_TENANT)
            return self._known.callers[named.tenant]
        shown = next((str(value) for key, value in metadata if key == "authorization"), "")
        if not shown:
            raise Unauthenticated(_NO_KEY)
        parts = parse_key(shown_key(shown))
        known = self._known.keys.get(parts.key_id, _NOBODY) if parts else _NOBODY
        good = matches(parts.secret if parts else "", known.hash)
        if not good or known is _NOBODY:
            raise Unauthenticated(_WRONG_KEY)
        return known.caller

    def weight(self, tenant: str) -> float:
        """Return the tenant's weight among tenants whose jobs wait; 1 for one that is no longer in the file."""
        known = self._known.tenants.get(tenant)
        return known.weight if known else 1.0

    def quotas(self, tenant: str) -> Quotas:
        """Return the quotas of a tenant. A tenant that is no longer in the file has none, but cannot call either."""
        known = self._known.tenants.get(tenant)
        return known.quotas if known else UNBOUNDED

    async def _look(self) -> None:
        async with self._reading:
            now = self._clock.monotonic()
            if now - self._looked_at < _LOOK_S:
                return  # another call has looked meanwhile
            self._looked_at = now
            state = file_state(self._path)
            if state == self._state:
                return
            self._state = state
            try:
                self._known = await asyncio.to_thread(_known_of, self._path)
            except ConfigError as error:
                _log.error(
                    "the file of tenants cannot be used; the tenants that were read before stay valid",
                    extra={"text": error.message},
                )
            else:
                _log.info("the file of tenants was read again", extra={"keys": len(self._known.keys)})


def _known_of(path: Path) -> _Known:
    tenants = read_tenants(path)
    callers = {tenant.name: _caller(tenant) for tenant in tenants if not tenant.disabled}
    keys = {
        key.key_id: _KnownKey(caller=callers[tenant.name], hash=key.hash)
        for tenant in tenants
        if not tenant.disabled
        for key in tenant.keys
    }
    return _Known(keys=keys, callers=callers, tenants={tenant.name: tenant for tenant in tenants})


def _caller(tenant: Tenant) -> Caller:
    return Caller(
        role=Role.TENANT,
        name=tenant.name,
        tenant=tenant.name,
        max_calls=tenant.quotas.calls,
        max_streams=tenant.quotas.streams,
        grants=tenant.grants,
    )


class Admittance:
    """The reservation of a new job in its tenant's quotas, while the job is being admitted.

    The job's caller holds it, and so does the task that stores the job, which goes on when the caller leaves.
    """

    def __init__(self, *, begin: Callable[[], None], leave: Callable[[], None]) -> None:
        self._begin = begin
        self._leave = leave
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the reservation while the block runs."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._leave()

    def count(self) -> None:
        """Count the job, which has been stored, as a new job of its tenant."""
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


def _exceeded(quota: str, most: int, what: str, retry_after_s: float) -> QuotaExceeded:
    return QuotaExceeded(
        f"as many {what} as you may have: {most}",
        metadata={"quota": quota, "most": str(most)},
        retry_after_s=max(0.1, retry_after_s),
    )
