"""Which services of a fleet host which ControlNets, and findings about them for `bottega doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from bottega import kinds
from bottega.addons.controlnets.client.types import ControlNetHost, ServedControlNet
from bottega.client.addons.addon import CheckResult, LeftOutThing, ok, warn
from bottega.client.types.fleet import FleetMember, FleetStatus, HostedItem, ResidualProfile
from bottega.errors import ControlNetNotFound, InvalidRequest, NoControlNet, Violation


def controlnet_servers(fleet: FleetStatus, *, name: str | None = None) -> list[FleetMember]:
    """Return all ControlNet servers, or the one with this name.

    Raises:
        NoControlNet: No server has joined.
        InvalidRequest: No server has this name.
    """
    servers = fleet.of_kind(kinds.CONTROLNET)
    if not servers:
        raise NoControlNet("no ControlNet server has joined")
    chosen = [server for server in servers if name in (None, server.name)]
    if not chosen:
        names = ", ".join(server.name for server in servers)
        rule = Violation(field="server", description=f"no server has this name; joined: {names}")
        raise InvalidRequest(f"{name}: {rule.description}", violations=[rule])
    return chosen


def hosts_of(fleet: FleetStatus, name: str, *, server: str | None = None) -> list[tuple[FleetMember, HostedItem]]:
    """Return the ControlNet servers that host a ControlNet, and it as they report it.

    Args:
        fleet: The fleet.
        name: Name of the ControlNet.
        server: Name of the only server to look at; None for all.

    Raises:
        ControlNetNotFound: No server hosts it.
        NoControlNet, InvalidRequest: See controlnet_servers.
    """
    hosts = [
        (member, net)
        for member in controlnet_servers(fleet, name=server)
        for net in member.load.hosted
        if net.kind == kinds.CONTROLNET and net.name == name
    ]
    if not hosts:
        where = server if server is not None else "any ControlNet server"
        raise ControlNetNotFound(f"{name} is not hosted by {where}")
    return hosts


def controlnets_of(fleet: FleetStatus) -> tuple[ServedControlNet, ...]:
    """Return the ControlNets that the fleet hosts, sorted by name, the most popular version of a name first."""
    found: dict[tuple[str, str, str], list[tuple[FleetMember, HostedItem]]] = {}
    for member in fleet.members:
        for net in (item for item in member.load.hosted if item.kind == kinds.CONTROLNET):
            found.setdefault((net.name, net.digest, net.base), []).append((member, net))
    served = [_served(fleet, hosted) for hosted in found.values()]
    return tuple(sorted(served, key=lambda net: (net.name, -net.popularity, net.digest)))


def _served(fleet: FleetStatus, hosted: list[tuple[FleetMember, HostedItem]]) -> ServedControlNet:
    net = hosted[0][1]
    models = (model for member in fleet.members for model in member.models)
    hosts = sorted((_host(member, one) for member, one in hosted), key=lambda host: (not host.server, host.name))
    return ServedControlNet(
        name=net.name,
        digest=net.digest,
        base=net.base,
        models=tuple(sorted({model.name for model in models if not net.base or model.base in ("", net.base)})),
        size_bytes=net.size_bytes,
        hosts=tuple(hosts),
        profiles=_profiles(one for _, one in hosted),
        control_modes=net.control_modes,
    )


def _profiles(hosted: Iterable[HostedItem]) -> tuple[ResidualProfile, ...]:
    """Return the profile of each base model; where hosts differ, the one with the lowest similarity."""
    least: dict[str, ResidualProfile] = {}
    for profile in (profile for net in hosted for profile in net.profiles):
        known = least.get(profile.model_hash)
        if known is None or profile.similarity < known.similarity:
            least[profile.model_hash] = profile
    return tuple(least.values())


def _host(member: FleetMember, net: HostedItem) -> ControlNetHost:
    return ControlNetHost(
        name=member.name,
        address=member.address,
        server=member.kind == kinds.CONTROLNET,
        readiness=net.readiness,
        popularity=net.popularity,
        sessions=net.sessions,
        pinned=net.pinned,
    )


# Names that fit on a line.
_MOST_NAMES = 8


def check_fleet(fleet: FleetStatus) -> Iterator[CheckResult]:
    """Yield findings about the ControlNets of a fleet, for `bottega doctor`."""
    nets = controlnets_of(fleet)
    if servers := len(fleet.of_kind(kinds.CONTROLNET)):
        names = sorted({net.name for net in nets})
        listed = ", ".join(names[:_MOST_NAMES]) or "no ControlNet"
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield ok(f"{servers} ControlNet server{'' if servers == 1 else 's'} joined, with {listed}{more}")
    for name in sorted({net.name for net in nets if not net.models}):
        yield warn(f"no served model can be drawn with the ControlNet {name}", f"bottega controlnets where {name}")
    versions = Counter((net.name, net.base) for net in nets)
    for name in sorted({name for (name, _), count in versions.items() if count > 1}):
        yield warn(
            f"the ControlNet {name} is served in more than one version",
            f"Keep one of them; bottega controlnets where {name} lists them.",
        )


def misfits(fleet: FleetStatus) -> Iterator[LeftOutThing]:
    """Yield the ControlNets that fit no served model."""
    bases = sorted({model.base for member in fleet.members for model in member.models if model.base})
    for net in controlnets_of(fleet):
        if not net.models:
            reason = f"it fits no served model: its shapes are {net.base}, theirs {', '.join(bases)}"
            yield LeftOutThing(service=net.hosts[0].name, name=net.name, reason=reason)
