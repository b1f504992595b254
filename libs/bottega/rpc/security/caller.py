"""The caller of a call: its role, name and tenant, what its tenant was granted, and the methods that its role may call.

A certificate of Bottega's authority has the URI bottega://ROLE/NAME, by which a server identifies its caller, and the
DNS names NAME.ROLE.bottega and ROLE.bottega, by which gRPC checks that it reached the right service. Certificates have
no host names, because services may move.

The module imports little, because every command imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, ClassVar, Protocol

from bottega.errors import Forbidden, Unauthenticated
from bottega.strict import STRICT

MAX_GRANTED = 1024
MAX_NAME_CHARACTERS = 200
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 100.0
"""Bounds of a tenant's weight."""

NAME_RULE = "1 to 63 of a-z, 0-9, - and ., with neither - nor . at the beginning or end"
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
_URI = re.compile(r"bottega://([a-z]+)/([a-z0-9.-]+)")
_DOMAIN = "bottega"
_NOBODY = "the certificate has no valid identity: create one with bottega certs issue ROLE/NAME"

Metadata = Sequence[tuple[str, str | bytes]]
"""Metadata of a call, as in gRPC. Keys are in lower case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The names of shared models and adapters that a tenant may use. An empty list allows all of that kind.

    Raises ValueError for invalid names.
    """

    __pydantic_config__: ClassVar[Any] = STRICT

    models: tuple[str, ...] = ()
    loras: tuple[str, ...] = ()
    """Names of shared LoRAs. A tenant may always use its own."""
    controlnets: tuple[str, ...] = ()
    """Names of shared ControlNets. A tenant may always use its own."""

    def __post_init__(self) -> None:
        for kind in (field.name for field in fields(self)):
            names = getattr(self, kind)
            if len(names) > MAX_GRANTED:
                raise ValueError(f"{kind} must have at most {MAX_GRANTED} names")
            if not all(0 < len(name) <= MAX_NAME_CHARACTERS for name in names):
                raise ValueError(f"names in {kind} must have 1 to {MAX_NAME_CHARACTERS} characters")


ALL_GRANTED = Grants()


class Role(StrEnum):
    """The role of a caller."""

    LOCAL = "local"
    """Any caller of a listener without authentication."""
    TENANT = "tenant"
    OPERATOR = "operator"
    GATEWAY = "gateway"
    WORKER = "worker"
    ENCODE = "encode"
    """A worker that only encodes prompts."""
    DECODE = "decode"
    """A worker that only decodes latents."""
    CONTROLNET = "controlnet"
    LORAS = "loras"
    CACHE = "cache"
    ACTIVATIONS = "activations"
    SCALE = "scale"
    HTTP = "http"
    """The HTTP API. Its certificate only allows it to join the fleet; other calls carry the API key of its caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a service, a tenant or an operator."""

    role: Role
    name: str
    """Name, unique within the role; see NAME_RULE."""

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"

    @property
    def uri(self) -> str:
        """The URI in its certificate, by which servers identify it as a caller."""
        return f"bottega://{self.role}/{self.name}"

    @property
    def dns_names(self) -> tuple[str, str]:
        """The DNS names in its certificate, by which its callers identify it: its own, and that of its role."""
        return dns_name(self.role, self.name), dns_name(self.role)


def dns_name(role: str, name: str = "") -> str:
    """Return the DNS name that a server's certificate must have.

    Args:
        name: Name of the server; "" means any server of the role.
    """
    return ".".join(filter(None, (name, role, _DOMAIN)))


def is_name(name: str) -> bool:
    """Return whether a name is valid for an identity; see NAME_RULE."""
    return _NAME.fullmatch(name) is not None


def identity_from(text: str) -> Identity | None:
    """Parse "ROLE/NAME". Return None if the text is not an identity."""
    role, _, name = text.partition("/")
    return Identity(role=Role(role), name=name) if role in set(Role) - {Role.LOCAL} and is_name(name) else None


def identity_in(uris: Iterable[str]) -> Identity | None:
    """Return the identity in a certificate's URIs, or None if there is not exactly one."""
    found = [match for uri in uris if (match := _URI.fullmatch(uri))]
    return identity_from(f"{found[0][1]}/{found[0][2]}") if len(found) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """An authenticated caller."""

    role: Role
    name: str = ""
    """Name, unique within the role."""
    tenant: str = ""
    """Tenant whose jobs and pictures the caller sees; "" if there are no tenants."""
    max_calls: int = 0
    """Upper bound on unary calls of the tenant that are served at the same time; 0 means no bound."""
    max_streams: int = 0
    """Upper bound on streams of the tenant that are open at the same time; 0 means no bound."""
    grants: Grants = ALL_GRANTED
    """Models and adapters that the tenant may use."""


LOCAL = Caller(role=Role.LOCAL)
"""The caller on a listener without authentication. It may call all methods."""

_caller: ContextVar[Caller] = ContextVar("caller", default=LOCAL)
_host: ContextVar[str] = ContextVar("caller_host", default="")


def caller() -> Caller:
    """Return the caller of the call that this task serves. Tasks started by the call have the same caller."""
    return _caller.get()


def caller_host() -> str:
    """Return the host of the caller, as in Peer.host, even if another gateway has passed the call on."""
    return _host.get()


def bind_caller(known: Caller, *, host: str) -> None:
    """Set the caller of the call that this task serves, and its host. Only the interceptor calls this."""
    _caller.set(known)
    _host.set(host)


class CallAuthenticator(Protocol):
    """Authenticates the callers of a listener."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return the caller, or raise Unauthenticated.

        Args:
            identities: URIs in the peer's certificate; empty without a certificate.
        """


class AllLocal:
    """A CallAuthenticator for listeners without authentication: every caller is LOCAL."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return LOCAL."""
        del identities, metadata
        return LOCAL


class CertificateAuthenticator:
    """A CallAuthenticator for listeners that require client certificates."""

    async def authenticate(self, identities: Sequence[str], metadata: Metadata) -> Caller:
        """Return the caller that the certificate names. Raises Unauthenticated."""
        del metadata
        known = caller_in(identities)
        if known is None:
            raise Unauthenticated(_NOBODY)
        return known


def caller_in(identities: Sequence[str]) -> Caller | None:
    """Return the caller that a certificate names by its URIs, or None."""
    identity = identity_in(identities)
    if identity is None:
        return None
    tenant = identity.name if identity.role is Role.TENANT else ""
    return Caller(role=identity.role, name=identity.name, tenant=tenant)


CALLER_KEY = "x-bottega-caller"
"""Metadata key with the identity of the caller whose call a gateway passes on to another gateway."""
CALLER_HOST_KEY = "x-bottega-caller-host"
"""Metadata key with the host of that caller."""

# What gateways pass on to the one that is the scheduler.
_PASSED_ON = (
    "/bottega.v1.ImageService/",
    "/bottega.v1.WebhookService/",
    "/bottega.v1.FleetService/ListMembers",
)
_CALLERS = frozenset({Role.TENANT, Role.OPERATOR})


def caller_uris(identities: Sequence[str], metadata: Metadata, *, method: str) -> Sequence[str]:
    """Return the URIs that name the caller of a call.

    They are the URIs in the peer's certificate. If the peer is a gateway that passes on the call of a tenant or an
    operator, they are the URI of this tenant or operator, which the metadata name.
    """
    passed_on = identity_from(_passed_on(CALLER_KEY, identities, metadata, method))
    return [passed_on.uri] if passed_on is not None and passed_on.role in _CALLERS else identities


def passed_on_host(identities: Sequence[str], metadata: Metadata, *, method: str) -> str:
    """Return the host of a caller whose call a gateway passes on; "" for other calls, whatever their metadata say."""
    return _passed_on(CALLER_HOST_KEY, identities, metadata, method)


def _passed_on(wanted: str, identities: Sequence[str], metadata: Metadata, method: str) -> str:
    """Return what the metadata of a call say of its caller if its peer is a gateway that passes it on, else ""."""
    peer = identity_in(identities)
    if peer is None or peer.role is not Role.GATEWAY or not method.startswith(_PASSED_ON):
        return ""
    return next((value for key, value in metadata if key == wanted and isinstance(value, str)), "")


_OPERATOR = frozenset({Role.OPERATOR})
_GATEWAY = frozenset({Role.GATEWAY})
_GATEWAY_OR_OPERATOR = _GATEWAY | _OPERATOR
_WORKER = frozenset({Role.WORKER})
_STAGES = frozenset({Role.ENCODE, Role.DECODE})
_MEMBERS = _STAGES | {Role.WORKER, Role.CONTROLNET, Role.LORAS, Role.CACHE, Role.ACTIVATIONS, Role.SCALE, Role.HTTP}

METHOD_ROLES: Mapping[str, frozenset[Role]] = {
    f"/bottega.v1.{method}": roles
    for method, roles in {
        "ImageService/Generate": _CALLERS,
        "ImageService/GetImage": _CALLERS,
        "ImageService/SubmitJob": _CALLERS,
        "ImageService/GetJob": _CALLERS,
        "ImageService/ListJobs": _CALLERS,
        "ImageService/WatchJob": _CALLERS,
        "ImageService/CancelJob": _CALLERS,
        "ImageService/DeleteJob": _CALLERS,
        "ImageService/ListModels": _CALLERS,
        "ImageService/ListAdapters": _CALLERS,
        "ImageService/GetJobTrace": _CALLERS,
        "FleetService/Join": _MEMBERS,
        "FleetService/ListMembers": _OPERATOR,
        "FleetService/AdmitJobs": _GATEWAY,
        "WebhookService/ListWebhookEvents": _OPERATOR,
        "WebhookService/ReplayWebhookEvents": _OPERATOR,
        "WorkerService/RunAttempt": _GATEWAY,
        "WorkerService/CancelAttempt": _GATEWAY,
        "WorkerService/ListAttempts": _GATEWAY,
        "WorkerService/WatchCheckpoints": _GATEWAY,
        "WorkerService/PreviewAttempt": _GATEWAY,
        "TemplateService/ListTemplates": _OPERATOR,
        "TemplateService/DropTemplate": _OPERATOR,
        "TemplateService/ProfileBlocks": _OPERATOR,
        "ControlNetService/Prefetch": _GATEWAY_OR_OPERATOR,
        "ControlNetService/ListControlNets": _OPERATOR,
        "ControlNetService/AddControlNet": _OPERATOR,
        "ControlNetService/SetProfile": _OPERATOR,
        "ControlNetService/PinControlNet": _OPERATOR,
        "LoraService/GetLora": _GATEWAY_OR_OPERATOR,
        "LoraService/PrefetchLoras": _GATEWAY,
        "LoraService/UploadLora": _OPERATOR,
        "LoraService/RegisterLora": _OPERATOR,
        "LoraService/ListLoras": _GATEWAY_OR_OPERATOR,
        "LoraService/DeleteLora": _OPERATOR,
        "LoraService/PinLora": _OPERATOR,
        "LoraService/SetLoraProfile": _OPERATOR,
        "LoraService/ListQuarantine": _OPERATOR,
        "LoraService/RestoreLora": _OPERATOR,
        "LoraService/DiscardLora": _OPERATOR,
        "CacheService/GetCacheStats": _OPERATOR,
        "CacheService/GetCacheEntry": _OPERATOR,
        "CacheService/ListCacheEntries": _OPERATOR,
        "CacheService/ClearCache": _OPERATOR,
        "CacheService/ListCacheProfiles": _OPERATOR,
        "CacheService/SetCacheProfile": _OPERATOR,
        "ActivationService/PrefetchTemplates": _GATEWAY,
        "ActivationService/ListStoredTemplates": _OPERATOR,
        "ActivationService/DropStoredTemplate": _OPERATOR,
        "ActivationService/PinTemplate": _OPERATOR,
        "ActivationService/WarmTemplate": _OPERATOR,
        "ActivationService/ListBlockProfiles": _OPERATOR,
        "ActivationService/SetBlockProfile": _OPERATOR,
        "LinkService/OpenLink": _WORKER,
    }.items()
}
"""Roles that may call a method, by method as gRPC names it. All other methods are for operators."""

AUDITED: frozenset[str] = frozenset(
    f"/bottega.v1.{method}"
    for method in (
        "ImageService/Generate",
        "ImageService/SubmitJob",
        "ImageService/CancelJob",
        "ImageService/DeleteJob",
        "FleetService/Join",
        "WebhookService/ReplayWebhookEvents",
        "TemplateService/DropTemplate",
        "TemplateService/ProfileBlocks",
        "ControlNetService/AddControlNet",
        "ControlNetService/SetProfile",
        "ControlNetService/PinControlNet",
        "LoraService/UploadLora",
        "LoraService/RegisterLora",
        "LoraService/DeleteLora",
        "LoraService/PinLora",
        "LoraService/SetLoraProfile",
        "LoraService/RestoreLora",
        "LoraService/DiscardLora",
        "CacheService/ClearCache",
        "CacheService/SetCacheProfile",
        "ActivationService/DropStoredTemplate",
        "ActivationService/PinTemplate",
        "ActivationService/WarmTemplate",
        "ActivationService/SetBlockProfile",
    )
)
"""Methods that change something: each call writes a line in the audit log. Calls between services do not."""


def check_method(method: str, known: Caller) -> None:
    """Raise Forbidden if the caller's role may not call a method. LOCAL may call all methods."""
    allowed = METHOD_ROLES.get(method, _OPERATOR)
    if known.role is Role.LOCAL or known.role in allowed:
        return
    rule = "needs an operator's certificate" if Role.OPERATOR in allowed else f"is for {' or '.join(sorted(allowed))}"
    raise Forbidden(f"{known.role} {known.name} may not call this method: it {rule}", metadata={"role": known.role})
