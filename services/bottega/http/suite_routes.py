"""The routes that list what requests may name beside models, and the services of the suite."""

from __future__ import annotations

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from bottega.client.types.fleet import FleetMember, HostedItem
from bottega.client.types.models import Adapter, AdapterKindName
from bottega.errors import Forbidden, MethodNotServed
from bottega.http.context import context_of
from bottega.http.gateway import bound_key


async def list_loras(request: Request) -> Response:
    """Return the LoRAs and textual inversion embeddings that requests may name."""
    return await _adapters(request, "lora")


async def list_controlnets(request: Request) -> Response:
    """Return the ControlNets that requests may name."""
    return await _adapters(request, "controlnet")


async def get_fleet(request: Request) -> Response:
    """Return the services of the suite, what they host and how busy they are.

    Only where the gateway asks its callers for no API key. A key is a tenant's, and the fleet is for operators, whom
    the gateway knows by their certificates: a certificate cannot be passed on, as its private key stays with its owner.
    """
    client, config = context_of(request).client, context_of(request).config
    if not config.fleet:
        raise MethodNotServed("the service has joined no fleet: `fleet` in its configuration is empty")
    if bound_key():
        raise Forbidden("the fleet is for operators, and an API key is a tenant's: use bottega fleet")
    await client.models()  # raises if the gateway has tenants
    fleet = await client.fleet()
    members = [_member(member) for member in fleet.members]
    facts = {"queued": fleet.queued, "longest_wait_s": fleet.longest_wait_s, "scheduler": fleet.scheduler}
    return _json({"object": "fleet", **facts, "data": members})


async def _adapters(request: Request, kind: AdapterKindName) -> Response:
    adapters = await context_of(request).client.adapters(kind)
    return _json({"object": "list", "data": [_adapter(adapter) for adapter in adapters]})


def _adapter(adapter: Adapter) -> dict[str, object]:
    return {
        "id": adapter.name,
        "object": adapter.kind,
        "digest": adapter.digest,
        "models": adapter.models,
        "trigger_words": adapter.trigger_words,
        "control_modes": adapter.control_modes,
    }


def _member(member: FleetMember) -> dict[str, object]:
    load = member.load
    return {
        "name": member.name,
        "kind": member.kind,
        "address": member.address,
        "version": member.version,
        "device": member.device,
        "models": [model.name for model in member.models],
        "joined_s": member.joined_s,
        "heard_s": member.heard_s,
        "starting": member.starting.stage if member.starting else None,
        "draining": load.draining,
        "running": len(load.running),
        "steps_left": sum(attempt.steps_left for attempt in load.running),
        "memory_bytes": load.memory_bytes,
        "hosted": [_hosted(item) for item in load.hosted if item.name],
        "completed": load.activity.completed,
        "failed": load.activity.failed,
        "left_out": [{"name": item.name, "reason": item.reason} for item in load.left_out],
    }


def _hosted(item: HostedItem) -> dict[str, object]:
    return {"kind": item.kind, "name": item.name, "readiness": item.readiness}


def _json(value: object) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
