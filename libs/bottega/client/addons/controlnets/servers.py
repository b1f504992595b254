"""The ControlNet servers of a fleet: how they are called, and how they are told to host more and to keep profiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.client.addons.controlnets.addon import ADD_ON
from bottega.client.addons.controlnets.types import AddedControlNet, ResidualProfile
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.types.messages import build_message
from bottega.errors import BottegaError, ControlNetNotFound, InvalidRequest, NoControlNet, Unavailable, Violation
from bottega.v1 import controlnet_pb2, hosted_pb2
from bottega.v1.controlnet_pb2_grpc import ControlNetServiceStub
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration

if TYPE_CHECKING:
    from bottega.v1.controlnet_pb2_grpc import ControlNetServiceAsyncStub

# A server reads the headers of the weights and their hash, which of some GiB takes a while.
_ADD_S = 120.0
_LIST_S = 5.0
# A server writes a file.
_SET_PROFILE_S = 30.0
_SERVERS: ServiceCalls[ControlNetServiceAsyncStub] = ServiceCalls(
    add_on=ADD_ON, stub=ControlNetServiceStub, unavailable=Unavailable
)


def controlnet_servers(fleet: ListMembersResponse, *, name: str | None = None) -> list[Registration]:
    """All of them, or the one of that name. Raises NoControlNet without any, InvalidRequest where none has the name."""
    servers = [member.registration for member in fleet.members if member.registration.kind == kinds.CONTROLNET]
    if not servers:
        raise NoControlNet("no ControlNet server has joined")
    chosen = [server for server in servers if name in (None, server.name)]
    if not chosen:
        names = ", ".join(server.name for server in servers)
        rule = Violation(field="server", description=f"there is none of that name; joined: {names}")
        raise InvalidRequest(f"{name}: {rule.description}", violations=[rule])
    return chosen


async def add_to_server(server: Registration, request: controlnet_pb2.AddControlNetRequest) -> AddedControlNet:
    """Has a server host one more; what goes wrong is part of the answer."""
    try:
        async with _SERVERS.open(server) as stub:
            answer = await stub.AddControlNet(request, timeout=_ADD_S)
    except BottegaError as error:
        return AddedControlNet(server=server.name, error=error)
    return AddedControlNet(server=server.name, size_bytes=answer.controlnet.size_bytes)


async def import_root(servers: Sequence[Registration]) -> str:
    """The folder below which the servers host what is added. Raises InvalidRequest where they have none in common."""
    roots = set()
    for server in servers:
        async with _SERVERS.open(server) as stub:
            roots.add((await stub.ListControlNets(controlnet_pb2.ListControlNetsRequest(), timeout=_LIST_S)).root)
    if len(roots) > 1 or "" in roots:
        why = "the servers have different roots: choose one" if len(roots) > 1 else "the configuration has no root"
        raise InvalidRequest(f"nothing can be added: {why}", violations=[Violation(field="server", description=why)])
    return roots.pop()


async def store_profile(
    fleet: ListMembersResponse, name: str, profile: ResidualProfile, *, digest: str | None
) -> tuple[str, ...]:
    """Has every server that hosts the ControlNet remember its profile; returns their names.

    digest: of the version that was measured; None is whatever each of them has under that name. Raises
    ControlNetNotFound where no server hosts it, and what a server refuses it with.
    """
    hosts = [
        (member.registration, net.digest)
        for member in fleet.members
        if member.registration.kind == kinds.CONTROLNET
        for net in member.load.hosted
        if net.kind == kinds.CONTROLNET and net.name == name and digest in (None, net.digest)
    ]
    if not hosts:
        raise ControlNetNotFound(f"no ControlNet server hosts {name}: a profile is of use for servers only")
    message = build_message(
        hosted_pb2.ResidualProfile(model_hash=profile.model_hash),
        num_inference_steps=profile.num_inference_steps,
        similarity=profile.similarity,
    )
    for server, hosted in hosts:
        request = controlnet_pb2.SetProfileRequest(name=name, digest=hosted, profile=message)
        async with _SERVERS.open(server) as stub:
            await stub.SetProfile(request, timeout=_SET_PROFILE_S)
    return tuple(server.name for server, _ in hosts)
