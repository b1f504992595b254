"""Tenants: the callers of the public port, identified by API key or certificate, with their weights and quotas.

Tenants are in a file, or in a database for several gateways (`database`). They are read again when they change, so
replaced keys and disabled tenants are refused at once. Quotas are checked before a job is accepted, so that a refused
job costs nothing.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bottega.clocks import Clock
from bottega.errors import ConfigError, Unauthenticated, Unavailable
from bottega.gateway.config import DATABASE_SCHEMES
from bottega.gateway.jobs.store.quotas import MINUTE_S, TenantUsage, check_quotas, is_bounded
from bottega.rpc.security.api_keys import hashed, matches, parse_key, shown_key
from bottega.rpc.security.caller import Caller, Metadata, Role, caller_in
from bottega.rpc.security.private_files import file_state
from bottega.rpc.security.tenant_file import NO_WEBHOOKS, UNBOUNDED, Quotas, Tenant, TenantWebhooks, read_tenants

# Seconds between two checks whether the file has changed. A check takes microseconds.
_LOOK_S = 1.0
_NO_KEY = (
    "this gateway requires an API key: BOTTEGA_API_KEY, Client(api_key=...), or metadata `authorization: Bearer KEY`"
)
# One text for every reason, so that guessing reveals nothing about existing keys.
_WRONG_KEY = "the API key is not valid: it is unknown to this gateway, was replaced, or its tenant is disabled"
_WRONG_TENANT = "the certificate's tenant is unknown to this gateway, or disabled: see bottega tenants list"
_OUTDATED = "the gateway cannot read its tenants, so it does not know which API keys are still valid; retry"
_OUTDATED_RETRY_S = 5.0

_log = logging.getLogger(__name__)

ReadUsage = Callable[[str], Awaitable[TenantUsage]]


class TenantTerms:
    """The weights and quotas of tenants without a file of tenants: equal weights and no quotas.

    Args:
        webhooks: The secrets that sign webhooks.
    """

    def __init__(self, webhooks: TenantWebhooks = NO_WEBHOOKS) -> None:
        self._webhooks = webhooks

    def weight(self, tenant: str) -> float:
        """Return the tenant's weight among tenants whose jobs wait, above 0."""
        del tenant
        return 1.0

    def quotas(self, tenant: str) -> Quotas:
        """Return the quotas of a tenant."""
        del tenant
        return UNBOUNDED

    @property
    def valid(self) -> bool:
        """Whether the tenants were read recently enough to tell which keys are valid."""
        return True

    async def start(self) -> None:
        """Begin to follow changes of the tenants."""

    async def close(self) -> None:
        """Stop following changes of the tenants."""

    async def refresh(self) -> None:
        """Read the file of tenants again if it has changed."""

    def webhooks(self, tenant: str) -> TenantWebhooks:
        """Return the webhook of a tenant and its secrets; called in any thread."""
        del tenant
        return self._webhooks


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownKey:
    caller: Caller
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Tenants by what a call shows."""

    keys: Mapping[str, _KnownKey]
    """API keys of tenants that are not disabled, by key ID."""
    callers: Mapping[str, Caller]
    """Callers of tenants that are not disabled, by tenant name."""
    tenants: Mapping[str, Tenant]
    """All tenants, by name."""


# Its hash is compared for an unknown key ID, so that the check takes as long as for a known one.
_NOBODY = _KnownKey(caller=Caller(role=Role.TENANT), hash=hashed(secrets.token_hex(32)))


class KnownTenants(TenantTerms):
    """A CallAuthenticator for tenants that are in memory, with their weights and quotas."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        super().__init__()
        self._known = _known_of(tenants)

    def use(self, tenants: Sequence[Tenant]) -> None:
        """Replace all tenants."""
        self._known = _known_of(tenants)

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return the caller that the certificate names, else the tenant of the API key.

        Raises Unauthenticated, and Unavailable while it is not known which keys are valid.

        The certificate of a door for HTTP names no caller: the key of the door's own caller comes with the call.
        """
        await self.refresh()
        named = caller_in(identities)
        if named is not None and named.role not in (Role.TENANT, Role.HTTP):
            return named
        if not self.valid:
            raise Unavailable(_OUTDATED, retry_after_s=_OUTDATED_RETRY_S)
        if named is not None and named.role is Role.TENANT:
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
        """Return the tenant's weight among tenants whose jobs wait; 1 for a tenant that is no longer there."""
        known = self._known.tenants.get(tenant)
        return known.weight if known else 1.0

    def quotas(self, tenant: str) -> Quotas:
        """Return the quotas of a tenant. A tenant that is not there has no quotas, but cannot call either."""
        known = self._known.tenants.get(tenant)
        return known.quotas if known else UNBOUNDED

    def webhooks(self, tenant: str) -> TenantWebhooks:
        """Return the webhook of a tenant and its secrets; none for a tenant that is no longer there."""
        known = self._known.tenants.get(tenant)
        return known.webhooks if known else NO_WEBHOOKS


class TenantAuthenticator(KnownTenants):
    """A CallAuthenticator for the tenants in a file, with their weights and quotas.

    Raises ConfigError if the file cannot be used at the start. If a later version cannot be used, the last good one
    stays valid.
    """

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._state = file_state(path)
        super().__init__(read_tenants(path))
        self._looked_at = clock.monotonic()
        self._reading = asyncio.Lock()

    async def refresh(self) -> None:
        """Read the file again if it has changed since the last second."""
        if self._clock.monotonic() - self._looked_at >= _LOOK_S:
            await self._look()

    async def _look(self) -> None:
        async with self._reading:
            now = self._clock.monotonic()
            if now - self._looked_at < _LOOK_S:
                return  # another call has checked meanwhile
            self._looked_at = now
            state = file_state(self._path)
            if state == self._state:
                return
            self._state = state
            try:
                self.use(await asyncio.to_thread(read_tenants, self._path))
            except ConfigError as error:
                _log.error(
                    "the changed file of tenants cannot be used; the tenants read before stay valid",
                    extra={"text": error.message},
                )
            else:
                _log.info("the file of tenants was read again", extra={"keys": len(self._known.keys)})


def known_tenants(place: str, *, application: str, clock: Clock) -> KnownTenants | None:
    """Return the tenants of a file or a database; None if `place` is empty, and callers need no key.

    Raises ConfigError.

    Args:
        place: Path or URL.
        application: Name that PostgreSQL shows for the connections.
        clock: Clock of the gateway.
    """
    if not place:
        return None
    if not place.startswith(DATABASE_SCHEMES):
        return TenantAuthenticator(Path(place), clock)
    from bottega.gateway.tenants.database import DatabaseTenants  # it needs psycopg, which is an extra

    return DatabaseTenants(place, application=application, clock=clock)


def _known_of(tenants: Sequence[Tenant]) -> _Known:
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
    """A reservation of one job in its tenant's quotas, while the job is being admitted.

    The call that admits the job holds it, and so does the task that stores the job, which may outlive that call.
    """

    def __init__(self, *, begin: Callable[[], None], leave: Callable[[], None]) -> None:
        self._begin = begin
        self._leave = leave
        self._holders = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the reservation while the block runs."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._leave()

    def count(self) -> None:
        """Turn the reservation into a counted job of the tenant, because the job has been stored."""
        self._begin()


class QuotaLedger:
    """Counts the jobs of each tenant and compares them with the tenant's quotas before they are checked any further.

    It knows the jobs of this gateway since its start. The store, which knows all, has the last word (JobStore.add).

    Args:
        terms: The weights and quotas of tenants.
        waiting: Returns the number of waiting jobs of a tenant.
        usage: Reads the number of jobs and stored bytes of a tenant from the store.
        retry_s: Returns the estimated seconds until a waiting job starts.
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

    def of_store(self, tenant: str) -> Quotas:
        """Return the quotas that the store checks as well, over all gateways: all but `queued`, which the queue knows.

        The store hears a moment later than the queue that a job waits no more.
        """
        quotas = self._terms.quotas(tenant)
        return replace(quotas, queued=0) if quotas.queued else quotas

    @asynccontextmanager
    async def admitting(self, tenant: str, *, asks_store: bool = True) -> AsyncIterator[Admittance]:
        """Reserve a job in its tenant's quotas while the block runs. Call `Admittance.count` once it is stored.

        Raises QuotaExceeded.

        Args:
            asks_store: Whether to check the quotas that only the store knows, before it does so itself.
        """
        quotas = self._terms.quotas(tenant)
        self._admitting[tenant] += 1
        place = Admittance(
            begin=functools.partial(self._begin, tenant, quotas), leave=functools.partial(self._leave, tenant)
        )
        with place.held():
            if is_bounded(quotas):
                await self._check(tenant, quotas, asks_store=asks_store)
            yield place

    def _begin(self, tenant: str, quotas: Quotas) -> None:
        if quotas.per_minute:
            self._begun.setdefault(tenant, deque()).append(self._clock.monotonic())

    def _leave(self, tenant: str) -> None:
        self._admitting[tenant] -= 1
        if not self._admitting[tenant]:
            del self._admitting[tenant]

    async def _check(self, tenant: str, quotas: Quotas, *, asks_store: bool) -> None:
        others, now, recent = self._admitting[tenant] - 1, self._clock.wall(), self._recent(tenant)
        oldest = now + recent[0] - self._clock.monotonic() if recent else None
        known = TenantUsage(waiting=self._waiting(tenant), jobs_in_minute=len(recent), oldest_in_minute=oldest)
        here = replace(quotas, per_day=0, stored_bytes=0)
        retry_s = self._retry_s() if quotas.queued else 0.0
        check_quotas(here, known, now_wall=now, others=others, waiting_retry_s=retry_s)
        if asks_store and (quotas.per_day or quotas.stored_bytes):
            check_quotas(self.of_store(tenant), await self._usage(tenant), now_wall=now, others=others)

    def _recent(self, tenant: str) -> deque[float]:
        begun = self._begun.get(tenant, deque())
        while begun and begun[0] <= self._clock.monotonic() - MINUTE_S:
            begun.popleft()
        if not begun:
            self._begun.pop(tenant, None)
        return begun
