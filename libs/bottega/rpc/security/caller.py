"""Who makes a call: the role, the name and the tenant that its listener found out. Knows no key and no certificate."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from bottega.rpc.security.grants import ALL_GRANTED, Grants

Metadata = Sequence[tuple[str, str | bytes]]
"""Of a call, as gRPC has it: keys are in lower case."""


class Role(StrEnum):
    """What a caller is. LOCAL: whoever calls where nobody is asked."""

    LOCAL = "local"
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
    """Who calls. name: among those of its role. tenant: whose jobs and pictures it sees; empty where nobody is told
    apart. max_calls, max_streams: of its tenant that may be served at once; 0 is without bound. grants: of its tenant.
    """

    role: Role
    name: str = ""
    tenant: str = ""
    max_calls: int = 0
    max_streams: int = 0
    grants: Grants = ALL_GRANTED


LOCAL = Caller(role=Role.LOCAL)
"""Whoever calls where nobody is asked who they are; may do all."""

_caller: ContextVar[Caller] = ContextVar("caller", default=LOCAL)


def caller() -> Caller:
    """Who makes the call that is served in this task, or began it."""
    return _caller.get()


def bind_caller(known: Caller) -> None:
    """Says who makes the call that is served in this task. For the interceptor."""
    _caller.set(known)


class CallAuthenticator(Protocol):
    """How a listener knows its callers."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return the caller, or raise Unauthenticated.

        Args:
            identities: URIs of the peer's certificate; empty without one.
        """


class AllLocal:
    """A CallAuthenticator that asks nobody."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """LOCAL."""
        del identities, metadata
        return LOCAL
