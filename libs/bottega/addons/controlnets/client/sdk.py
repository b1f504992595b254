"""The SDK's methods about ControlNets."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.addons.controlnets.client.fleet import check_fleet, controlnet_servers, controlnets_of, hosts_of, misfits
from bottega.addons.controlnets.client.types import AddedControlNet, MeasuredProfile, ProfileCase, ServedControlNet
from bottega.client.addons.addon import ClientAddOn, ServiceCalls
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.sync import GatewayClient, blocking
from bottega.client.types.fleet import FleetMember, FleetStatus, HostedItem, Readiness, ResidualProfile
from bottega.client.types.inputs import ControlNet
from bottega.client.types.messages import as_list, build_message
from bottega.client.types.picture import Picture
from bottega.errors import (
    BottegaError,
    ControlNetNotFound,
    ControlNetUnusable,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    NoControlNet,
    TooLarge,
    Unavailable,
    Violation,
)
from bottega.v1 import controlnet_pb2, hosted_pb2
from bottega.v1.controlnet_pb2_grpc import ControlNetServiceStub

if TYPE_CHECKING:
    from bottega.v1.controlnet_pb2_grpc import ControlNetServiceAsyncStub


# A server reads the headers of the weights and hashes them, which takes a while for some GiB.
_ADD_S = 120.0
_LIST_S = 5.0
_SET_PROFILE_S = 30.0
# The largest ControlNet in use has 5 GB, a minute's reading from a slow disk.
_WARM_S = 120.0
_LOOK_S = 0.2
_SERVERS: ServiceCalls[ControlNetServiceAsyncStub] = ServiceCalls(
    kind=kinds.CONTROLNET, title="ControlNet server", stub=ControlNetServiceStub, unavailable=Unavailable
)


async def add_to_server(server: FleetMember, request: controlnet_pb2.AddControlNetRequest) -> AddedControlNet:
    """Ask a server to host a ControlNet. An error is returned, not raised, because other servers may succeed."""
    try:
        async with _SERVERS.open(server) as stub:
            answer = await stub.AddControlNet(request, timeout=_ADD_S)
    except BottegaError as error:
        return AddedControlNet(server=server.name, error=error)
    return AddedControlNet(server=server.name, size_bytes=answer.controlnet.size_bytes)


async def _add_to_any(
    catalogue: str, servers: Sequence[FleetMember], request: controlnet_pb2.AddControlNetRequest
) -> list[AddedControlNet]:
    """Ask the servers that share a catalogue, one after the other, to host a ControlNet, until one succeeds.

    Returns:
        The response of the server that succeeded, or the errors of all servers.
    """
    refused = []
    for server in servers:
        added = await add_to_server(server, request)
        if added.error is None:
            return [replace(added, catalogue=catalogue)]
        refused.append(added)
    return refused


async def _catalogue_of(server: FleetMember) -> str:
    """Return the catalogue that a server shares; "" if it shares none, or does not answer."""
    try:
        async with _SERVERS.open(server) as stub:
            return (await stub.ListControlNets(controlnet_pb2.ListControlNetsRequest(), timeout=_LIST_S)).catalogue
    except BottegaError:
        return ""


async def import_root(servers: Sequence[FleetMember]) -> str:
    """Return the folder below which the servers host what is added. Raise InvalidRequest if they differ."""
    roots = set()
    for server in servers:
        async with _SERVERS.open(server) as stub:
            roots.add((await stub.ListControlNets(controlnet_pb2.ListControlNetsRequest(), timeout=_LIST_S)).root)
    if len(roots) > 1 or "" in roots:
        why = "the servers have different roots: choose one server" if len(roots) > 1 else "no root is configured"
        raise InvalidRequest(f"nothing can be added: {why}", violations=[Violation(field="server", description=why)])
    return roots.pop()


async def _ask_to_load(server: FleetMember, name: str) -> str:
    """Ask a server to load a ControlNet, also if a load has failed before. Return why that is impossible, or ""."""
    try:
        async with _SERVERS.open(server) as stub:
            await stub.Prefetch(controlnet_pb2.PrefetchRequest(names=[name], retry=True), timeout=_LIST_S)
    except BottegaError as error:
        return error.message
    return ""


_IN_MEMORY = {Readiness.LOADED: 0, Readiness.LOADING: 1}


def _too_large(name: str, hosts: Sequence[tuple[FleetMember, HostedItem]]) -> TooLarge:
    budgets = ", ".join(f"{server.name} has {_mib(server.load.budget_bytes)}" for server, _ in hosts)
    return TooLarge(f"{name} takes {_mib(hosts[0][1].size_bytes)}, and {budgets} for ControlNets (engine.budget_bytes)")


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _has_failed(net: HostedItem, failed_before: int) -> bool:
    """Return whether a load has failed since the service reported `failed_before` failed loads."""
    return bool(net.load_error) and net.readiness not in _IN_MEMORY and net.failed_loads != failed_before


def _spare_bytes(server: FleetMember) -> int:
    nets = (item for item in server.load.hosted if item.kind == kinds.CONTROLNET and item.readiness in _IN_MEMORY)
    return server.load.budget_bytes - sum(net.size_bytes for net in nets)


async def store_profile(
    fleet: FleetStatus, name: str, profile: ResidualProfile, *, digest: str | None
) -> tuple[str, ...]:
    """Make every server that hosts the ControlNet store its profile, and return the names of these servers.

    Args:
        digest: Hash of the version that was measured; None for the version that each server has.

    Raises:
        ControlNetNotFound: No server hosts the ControlNet.
        BottegaError: A server refuses the profile.
    """
    hosts = [
        (server, net.digest)
        for server in fleet.of_kind(kinds.CONTROLNET)
        for net in server.load.hosted
        if net.kind == kinds.CONTROLNET and net.name == name and digest in (None, net.digest)
    ]
    if not hosts:
        raise ControlNetNotFound(f"no ControlNet server hosts {name}, and only servers use profiles")
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


class AsyncControlNetMethods(AsyncGatewayClient):
    """The methods of AsyncClient about ControlNets."""

    async def controlnets(self) -> tuple[ServedControlNet, ...]:
        """Return the ControlNets that are served now, by name, with the services that host them."""
        return controlnets_of(await self.fleet())

    async def add_controlnet(self, name: str, folder: str, *, server: str | None = None) -> tuple[AddedControlNet, ...]:
        """Make ControlNet servers host a ControlNet, and return the response of each.

        If servers share a catalogue in a database, only one of them is asked; the others host the ControlNet soon.

        Args:
            name: Name of the ControlNet in requests.
            folder: Folder in Diffusers' layout, on the servers' machines, below the root that their configuration
                allows.
            server: Name of the only server that should host it; None for all servers.

        Raises:
            NoControlNet: No server has joined.
            InvalidRequest: No server has this name.
        """
        fleet = await self.fleet()
        request = build_message(controlnet_pb2.AddControlNetRequest(), name=name, folder=folder)
        servers = controlnet_servers(fleet, name=server)
        groups: dict[tuple[str, str], list[FleetMember]] = {}
        for one, place in zip(servers, await asyncio.gather(*map(_catalogue_of, servers)), strict=True):
            groups.setdefault((place, "" if place else one.name), []).append(one)
        asked = (_add_to_any(place, members, request) for (place, _), members in groups.items())
        return tuple(itertools.chain.from_iterable(await asyncio.gather(*asked)))

    async def controlnet_root(self, *, server: str | None = None) -> str:
        """Return the folder, on the servers' machines, below which added ControlNets must be."""
        return await import_root(controlnet_servers(await self.fleet(), name=server))

    async def warm_controlnet(self, name: str, *, servers: int = 1, timeout_s: float = _WARM_S) -> tuple[str, ...]:
        """Make servers load a ControlNet, wait until they have, and return the names of those that have it in memory.

        It stays there until other ControlNets need the memory; see pin_controlnet(). If a server cannot load it, the
        next one is asked.

        Args:
            name: Name of the ControlNet.
            servers: Number of servers that should have it. Those that have it already count first, then those with the
                most memory to spare.
            timeout_s: Longest time to wait. After it, the servers that have loaded it by then are returned.

        Raises:
            ControlNetNotFound: No server hosts the ControlNet.
            NoControlNet: Fewer servers host it.
            TooLarge: Fewer servers have memory for it.
            ControlNetUnusable: Too few servers can load it.
        """
        hosts = hosts_of(await self.fleet(), name)
        if len(hosts) < servers:
            raise NoControlNet(f"{name} is hosted by {len(hosts)} ControlNet servers, not by {servers}")
        small = [host for host in hosts if 0 < host[0].load.budget_bytes < host[1].size_bytes]
        if len(hosts) - len(small) < servers:
            raise _too_large(name, small)
        hosts = [host for host in hosts if host not in small]
        hosts.sort(key=lambda host: (_IN_MEMORY.get(host[1].readiness, 2), -_spare_bytes(host[0]), host[0].name))
        failed_before: dict[str, int] = {}  # failed loads of the servers that were asked, by name
        broken: dict[str, str] = {}
        until = time.monotonic() + timeout_s
        while True:
            while hosts and len(failed_before) - len(broken) < servers:
                member, net = hosts.pop(0)
                failed_before[member.name] = net.failed_loads
                if why := await _ask_to_load(member, name):
                    broken[member.name] = why
            found = hosts_of(await self.fleet(), name)
            asked = {member.name: net for member, net in found if member.name in failed_before}
            loaded = {server for server, net in asked.items() if net.readiness is Readiness.LOADED}
            if len(loaded) >= servers or time.monotonic() >= until:
                return tuple(sorted(loaded))
            for server, net in asked.items():
                if _has_failed(net, failed_before[server]):
                    broken[server] = net.load_error
            if not hosts and loaded | broken.keys() >= failed_before.keys():
                why = "; ".join(f"{server}: {broken[server]}" for server in sorted(broken))
                raise ControlNetUnusable(f"{name} cannot be loaded by {why}")
            await asyncio.sleep(_LOOK_S)

    async def pin_controlnet(self, name: str, *, pinned: bool = True, server: str | None = None) -> tuple[str, ...]:
        """Keep a ControlNet in the memory of its servers, or end that, and return the servers' names.

        A pinned ControlNet is loaded at once and after a restart, and evicted only if nothing else makes enough room.

        Args:
            name: Name of the ControlNet.
            pinned: Whether to keep it.
            server: Name of the only server that should keep it; None for all that host it.

        Raises:
            ControlNetNotFound: No server hosts the ControlNet.
        """
        hosts = hosts_of(await self.fleet(), name, server=server)
        for member, _ in hosts:
            async with _SERVERS.open(member) as stub:
                await stub.PinControlNet(
                    controlnet_pb2.PinControlNetRequest(name=name, pinned=pinned), timeout=_SET_PROFILE_S
                )
        return tuple(member.name for member, _ in hosts)

    async def profile_controlnet(
        self,
        name: str,
        cases: Iterable[ProfileCase],
        *,
        num_inference_steps: int | None = None,
        model: str | None = None,
        on_picture: Callable[[float], None] = lambda _: None,
    ) -> MeasuredProfile:
        """Measure how similar the residuals of a ControlNet are from step to step; its servers store the result.

        A picture of each case is drawn, and the lowest cosine counts. If it is at least .99, requests with at least as
        many steps may use the residuals of the previous step instead of waiting for a slow server. They must allow it,
        by fidelity or stale_residuals.

        Args:
            name: Name of the ControlNet.
            cases: Prompts and control images of the pictures.
            num_inference_steps: Steps of the pictures, ideally the fewest that you draw with; None for the model's
                default.
            model: Name of the model; None for the only one that is served.
            on_picture: Called with the similarity of each picture.
        """
        measured = await measure_residuals(
            self, name, cases, num_inference_steps=num_inference_steps, model=model, on_picture=on_picture
        )
        servers = await store_profile(await self.fleet(), name, measured.profile, digest=measured.digest)
        return replace(measured, servers=servers)

    async def set_controlnet_profile(
        self, name: str, *, similarity: float, num_inference_steps: int, model: str | None = None
    ) -> tuple[str, ...]:
        """Make the servers of a ControlNet store a similarity that you know, and return the servers' names.

        Args:
            name: Name of the ControlNet.
            similarity: Cosine between the residuals of adjacent steps, -1 to 1.
            num_inference_steps: Fewest steps for which the similarity holds; see profile_controlnet().
            model: Name of the model; None for the only one that is served.

        Raises:
            ModelNotFound: The model is not served, or several are and none was named.
        """
        models = await self.models()
        found = [one for one in models if model in (None, one.name)]
        if len(found) != 1:
            served = ", ".join(one.name for one in models) or "none"
            raise ModelNotFound(f"name the model; served: {served}", metadata={"served": served})
        profile = ResidualProfile(
            model_hash=found[0].model_hash, num_inference_steps=num_inference_steps, similarity=similarity
        )
        return await store_profile(await self.fleet(), name, profile, digest=None)


class ControlNetMethods(GatewayClient):
    """The methods of Client about ControlNets."""

    controlnets = blocking(AsyncControlNetMethods.controlnets)
    add_controlnet = blocking(AsyncControlNetMethods.add_controlnet)
    controlnet_root = blocking(AsyncControlNetMethods.controlnet_root)
    warm_controlnet = blocking(AsyncControlNetMethods.warm_controlnet)
    pin_controlnet = blocking(AsyncControlNetMethods.pin_controlnet)
    profile_controlnet = blocking(AsyncControlNetMethods.profile_controlnet)
    set_controlnet_profile = blocking(AsyncControlNetMethods.set_controlnet_profile)


async def measure_residuals(
    client: AsyncGatewayClient,
    name: str,
    cases: Iterable[ProfileCase],
    *,
    num_inference_steps: int | None,
    model: str | None,
    on_picture: Callable[[float], None],
) -> MeasuredProfile:
    """Draw the pictures one after the other, and measure how similar the residuals of their steps are.

    Args:
        on_picture: Called with the measurement of each picture.

    Raises:
        InvalidRequest: There are no cases, or a picture has fewer than two steps.
        NoControlNet: The servers do not all host the same ControlNet.
        BottegaError: Drawing failed.
    """
    found: list[tuple[float, Picture]] = []
    for seed, case in enumerate(_checked(cases)):
        net = ControlNet(name, case.image, control_mode=case.control_mode, measure_similarity=True)
        picture = await client.generate(
            case.prompt, seed=seed, model=model, num_inference_steps=num_inference_steps, controlnets=[net]
        )
        if len(picture.provenance.controlnets) != 1:
            raise InternalError(f"the picture's provenance has no entry for {name} by itself")
        use = picture.provenance.controlnets[0]
        if use.similarity is None:
            raise _broken("num_inference_steps", "two steps are needed, to compare them")
        found.append((use.similarity, picture))
        on_picture(use.similarity)
    if not found:
        raise _broken("cases", "at least one is needed")
    versions = {(picture.provenance.controlnets[0].digest, picture.provenance.model_hash) for _, picture in found}
    if len(versions) > 1:
        raise NoControlNet(f"{name} or the model was replaced between two pictures: measure again")
    picture = found[0][1]
    pictures = tuple(similarity for similarity, _ in found)
    profile = ResidualProfile(
        model_hash=picture.provenance.model_hash,
        num_inference_steps=picture.provenance.parameters.num_inference_steps,
        similarity=min(pictures),
    )
    return MeasuredProfile(digest=picture.provenance.controlnets[0].digest, profile=profile, pictures=pictures)


def _checked(cases: object) -> Iterator[ProfileCase]:
    for case in as_list(cases, name="cases", what="ProfileCase"):
        if not isinstance(case, ProfileCase):
            raise _broken("cases", f"must be a list of ProfileCase; got one {type(case).__name__}")
        yield case


def _broken(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{field}: {rule}", violations=[Violation(field=field, description=rule)])


ADD_ON = ClientAddOn(
    kind=kinds.CONTROLNET,
    title="ControlNet server",
    hosted_title="ControlNets",
    check_fleet=check_fleet,
    misfits=misfits,
)
