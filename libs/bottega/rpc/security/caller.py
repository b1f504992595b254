"""The caller of a call: its role, name and tenant, however the listener authenticated it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bottega.rpc.security.grants import ALL_GRANTED, Grants

Metadata = Sequence[tuple[str, str | bytes]]
"""Metadata of a call, as in gRPC. Keys are in lower case."""


class Role(StrEnum):
    """The role of a caller."""

    LOCAL = "local"
    """Any caller of a listener that authenticates nobody."""
    TENANT = "tenant"
    OPERATOR = "operator"
    GATEWAY = "gateway"
    WORKER = "worker"
    CONTROLNET = "controlnet"
    LORAS = "loras"
    CACHE = "cache"
    ACTIVATIONS = "activations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated caller."""

    role: Role
    name: str = ""
    """Name, unique within the role."""
    tenant: str = ""
    """Tenant whose jobs and pictures the caller sees; empty if there are no tenants."""
    max_calls: int = 0
    """Unary calls of the tenant that may be served at once; 0 is without a bound."""
    max_streams: int = 0
    """Streams of the tenant that may be served at once; 0 is without a bound."""
    grants: Grants = ALL_GRANTED
    """Models and adapters that the tenant may use."""


LOCAL = Caller(role=Role.LOCAL)
"""The caller where nobody is authenticated. It may do everything."""

_caller: ContextVar[Caller] = ContextVar("caller", default=LOCAL)


def caller() -> Caller:
    """Return the caller of the call that this task serves, or that started it."""
    return _caller.get()


def bind_caller(known: Caller) -> None:
    """Set the caller of the call that this task serves. For the interceptor."""
    _caller.set(known)


class CallAuthenticator(Protocol):
    """An interface by which a listener authenticates its callers."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return the caller, or raise Unauthenticated.

        Args:
            identities: URIs in the peer's certificate; empty without one.
        """


class AllLocal:
    """A CallAuthenticator that accepts everybody."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return LOCAL."""
        del identities, metadata
        return LOCAL
