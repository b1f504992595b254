"""Authenticates callers by the API keys in the file of tenants, so that rotated and disabled keys end at once."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bottega.clocks import Clock
from bottega.errors import ConfigError, Unauthenticated
from bottega.gateway.tenants.quotas import TenantTerms
from bottega.rpc.security.api_keys import hashed, matches, parse_key, shown_key
from bottega.rpc.security.caller import Caller, Metadata, Role
from bottega.rpc.security.certificate_calls import caller_in
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
