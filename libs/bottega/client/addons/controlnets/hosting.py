"""The ControlNets that a suite serves, by whom, and how servers are given more of them.

Reads what the fleet says of itself; knows gRPC, and nothing of pictures.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

import grpc

from bottega.client.types.messages import filled
from bottega.errors import BottegaError, InvalidRequest, NoControlNet, Unavailable, Violation
from bottega.rpc.channel import open_channel
from bottega.rpc.status import from_rpc_error, was_answered
from bottega.v1 import controlnet_pb2, controlnet_pb2_grpc, fleet_pb2
from bottega.v1.controlnet_pb2 import HostedControlNet

# A server reads the headers of the weights and their hash, which of some GiB takes a while.
_ADD_S = 120.0
_LIST_S = 5.0


class Readiness(StrEnum):
    """Where the weights of a ControlNet are, on its host."""

    UNKNOWN = ""
    ON_DISK = "on disk"
    LOADING = "loading"
    LOADED = "loaded"


_READINESS = {
    controlnet_pb2.HOSTED_STATE_ON_DISK: Readiness.ON_DISK,
    controlnet_pb2.HOSTED_STATE_LOADING: Readiness.LOADING,
    controlnet_pb2.HOSTED_STATE_LOADED: Readiness.LOADED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetHost:
    """A service that has a ControlNet. server: whether it is a ControlNet server; else a worker with weights at hand.

    popularity: sessions that used it, of the newest that the host remembers. sessions: open with it now.
    """

    name: str
    address: str
    server: bool
    readiness: Readiness
    popularity: int
    sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualProfile:
    """How similar residuals were from step to step, with one base model, in pictures of so many steps.

    similarity: cosine; from .99 on, requests that allow it may go on with the residuals of the step before.
    """

    model_hash: str
    num_inference_steps: int
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedControlNet:
    """A ControlNet in one version. Those of one name for one base model should be one.

    digest: hash of its weights and configuration, hex. base: what it was made for; models: those served now that it
    fits. size_bytes: of its weights in memory. profiles: what was measured of it.
    """

    name: str
    digest: str
    base: str
    models: tuple[str, ...]
    size_bytes: int
    hosts: tuple[ControlNetHost, ...]
    profiles: tuple[ResidualProfile, ...] = ()

    @property
    def popularity(self) -> int:
        """Over all its hosts."""
        return sum(host.popularity for host in self.hosts)

    @property
    def loaded_at(self) -> tuple[str, ...]:
        """Hosts that have it in memory."""
        return tuple(host.name for host in self.hosts if host.readiness is Readiness.LOADED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedControlNet:
    """What a server made of a ControlNet that it was to add. error: why it did not; else size_bytes says how large."""

    server: str
    size_bytes: int = 0
    error: BottegaError | None = None


def controlnets_of(fleet: fleet_pb2.ListMembersResponse) -> tuple[ServedControlNet, ...]:
    """What the members of a fleet host, by name, the most popular version first."""
    found: dict[tuple[str, str, str], list[tuple[fleet_pb2.Member, HostedControlNet]]] = {}
    for member in fleet.members:
        for net in member.load.controlnets:
            found.setdefault((net.name, net.digest, net.base), []).append((member, net))
    served = [_served(fleet, hosted) for hosted in found.values()]
    return tuple(sorted(served, key=lambda net: (net.name, -net.popularity, net.digest)))


async def add_to_servers(
    fleet: fleet_pb2.ListMembersResponse, name: str, folder: str, *, server: str | None
) -> tuple[AddedControlNet, ...]:
    """Has the ControlNet servers of a fleet host one more, or one of them by its name.

    Raises NoControlNet where there is no such server at all, and InvalidRequest where none has that name, or name or
    folder cannot be sent.
    """
    request = filled(controlnet_pb2.AddControlNetRequest(), name=name, folder=folder)
    chosen = _chosen(fleet, server)
    return tuple(await asyncio.gather(*(_add(one, request) for one in chosen)))


async def root_of(fleet: fleet_pb2.ListMembersResponse, *, server: str | None) -> str:
    """The folder below which the ControlNet servers of a fleet, or one of them by its name, host what is added.

    Raises as add_to_servers does, and InvalidRequest where they have none in common.
    """
    roots = set()
    for one in _chosen(fleet, server):
        async with controlnet_server(one) as stub:
            listed = await stub.ListControlNets(controlnet_pb2.ListControlNetsRequest(), timeout=_LIST_S)
            roots.add(listed.root)
    if len(roots) > 1 or "" in roots:
        why = "the servers have different roots: choose one" if len(roots) > 1 else "the configuration has no root"
        raise InvalidRequest(f"nothing can be added: {why}", violations=[Violation(field="server", description=why)])
    return roots.pop()


def _chosen(fleet: fleet_pb2.ListMembersResponse, server: str | None) -> list[fleet_pb2.Registration]:
    servers = [m.registration for m in fleet.members if m.registration.kind == fleet_pb2.SERVICE_KIND_CONTROLNET]
    if not servers:
        raise NoControlNet("no ControlNet server has joined")
    chosen = [one for one in servers if server in (None, one.name)]
    if not chosen:
        names = ", ".join(one.name for one in servers)
        rule = Violation(field="server", description=f"there is none of that name; joined: {names}")
        raise InvalidRequest(f"{server}: {rule.description}", violations=[rule])
    return chosen


@asynccontextmanager
async def controlnet_server(
    server: fleet_pb2.Registration,
) -> AsyncIterator[controlnet_pb2_grpc.ControlNetServiceAsyncStub]:
    """Calls to one ControlNet server. What goes wrong in the block is raised as a BottegaError."""
    async with open_channel(server.address) as channel:
        try:
            yield controlnet_pb2_grpc.ControlNetServiceStub(channel)
        except grpc.aio.AioRpcError as error:
            if not was_answered(error):
                raise Unavailable(f"{server.name} does not answer at {server.address}") from None
            raise from_rpc_error(error) from None


async def _add(server: fleet_pb2.Registration, request: controlnet_pb2.AddControlNetRequest) -> AddedControlNet:
    try:
        async with controlnet_server(server) as stub:
            answer = await stub.AddControlNet(request, timeout=_ADD_S)
    except BottegaError as error:
        return AddedControlNet(server=server.name, error=error)
    return AddedControlNet(server=server.name, size_bytes=answer.controlnet.size_bytes)


def _served(
    fleet: fleet_pb2.ListMembersResponse, hosted: list[tuple[fleet_pb2.Member, HostedControlNet]]
) -> ServedControlNet:
    net = hosted[0][1]
    hosts = sorted((_host(member, one) for member, one in hosted), key=lambda host: (not host.server, host.name))
    return ServedControlNet(
        name=net.name,
        digest=net.digest,
        base=net.base,
        models=tuple(sorted(set(_models(fleet, net.base)))),
        size_bytes=net.size_bytes,
        hosts=tuple(hosts),
        profiles=_profiles(one for _, one in hosted),
    )


def _profiles(hosted: Iterable[HostedControlNet]) -> tuple[ResidualProfile, ...]:
    """By base model, the one that says least: what decides."""
    least: dict[str, ResidualProfile] = {}
    for profile in (profile for net in hosted for profile in net.profiles):
        known = least.get(profile.model_hash)
        if known is None or profile.similarity < known.similarity:
            least[profile.model_hash] = ResidualProfile(
                model_hash=profile.model_hash,
                num_inference_steps=profile.num_inference_steps,
                similarity=profile.similarity,
            )
    return tuple(least.values())


def _host(member: fleet_pb2.Member, net: HostedControlNet) -> ControlNetHost:
    return ControlNetHost(
        name=member.registration.name,
        address=member.registration.address,
        server=member.registration.kind == fleet_pb2.SERVICE_KIND_CONTROLNET,
        readiness=_READINESS.get(net.state, Readiness.UNKNOWN),
        popularity=net.popularity,
        sessions=net.sessions,
    )


def _models(fleet: fleet_pb2.ListMembersResponse, base: str) -> Iterator[str]:
    for member in fleet.members:
        for model in member.registration.models:
            if not base or model.base in ("", base):
                yield model.name
