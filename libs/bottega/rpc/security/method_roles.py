"""The table of the roles that may call each method. Every server checks it for its own services."""

from __future__ import annotations

from collections.abc import Mapping

from bottega.errors import Forbidden
from bottega.rpc.security.caller import Caller, Role

_CALLERS = frozenset({Role.TENANT, Role.OPERATOR})
_OPERATOR = frozenset({Role.OPERATOR})
_GATEWAY = frozenset({Role.GATEWAY})
_GATEWAY_OR_OPERATOR = _GATEWAY | _OPERATOR
_WORKER = frozenset({Role.WORKER})
_MEMBERS = frozenset({Role.WORKER, Role.CONTROLNET, Role.LORAS, Role.CACHE, Role.ACTIVATIONS})

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
        "WorkerService/RunAttempt": _GATEWAY,
        "WorkerService/CancelAttempt": _GATEWAY,
        "WorkerService/ListAttempts": _GATEWAY,
        "WorkerService/WatchCheckpoints": _GATEWAY,
        "WorkerService/PreviewAttempt": _GATEWAY,
        "WorkerService/ListTemplates": _OPERATOR,
        "WorkerService/DropTemplate": _OPERATOR,
        "WorkerService/ProfileBlocks": _OPERATOR,
        "ControlNetService/Prefetch": _GATEWAY,
        "ControlNetService/ListControlNets": _OPERATOR,
        "ControlNetService/AddControlNet": _OPERATOR,
        "ControlNetService/SetProfile": _OPERATOR,
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
"""Roles by method, as gRPC names it. Other methods, of services that were added, are for operators."""

AUDITED: frozenset[str] = frozenset(
    f"/bottega.v1.{method}"
    for method in (
        "ImageService/Generate",
        "ImageService/SubmitJob",
        "ImageService/CancelJob",
        "ImageService/DeleteJob",
        "FleetService/Join",
        "WorkerService/DropTemplate",
        "WorkerService/ProfileBlocks",
        "ControlNetService/AddControlNet",
        "ControlNetService/SetProfile",
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
"""Methods that change something: each call is a line in the audit log. Calls between services are not."""


def check_method(method: str, caller: Caller) -> None:
    """Raise Forbidden if the caller's role may not call a method. LOCAL may call all."""
    allowed = METHOD_ROLES.get(method, _OPERATOR)
    if caller.role is Role.LOCAL or caller.role in allowed:
        return
    rule = "needs an operator's certificate" if Role.OPERATOR in allowed else f"is for {' or '.join(sorted(allowed))}"
    raise Forbidden(f"{caller.role} {caller.name} may not do that: it {rule}", metadata={"role": caller.role})
