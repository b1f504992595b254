"""Which ControlNets a suite serves, and where they are: read from what the fleet's members report."""

from __future__ import annotations

from collections.abc import Iterable

from bottega import kinds
from bottega.client.addons.controlnets.types import ControlNetHost, Readiness, ResidualProfile, ServedControlNet
from bottega.v1 import fleet_pb2, hosted_pb2
from bottega.v1.hosted_pb2 import Hosted

_READINESS = {
    hosted_pb2.HOSTED_STATE_ON_DISK: Readiness.ON_DISK,
    hosted_pb2.HOSTED_STATE_LOADING: Readiness.LOADING,
    hosted_pb2.HOSTED_STATE_LOADED: Readiness.LOADED,
}


def controlnets_of(fleet: fleet_pb2.ListMembersResponse) -> tuple[ServedControlNet, ...]:
    """What the members of a fleet host, by name, the most popular version first."""
    found: dict[tuple[str, str, str], list[tuple[fleet_pb2.Member, Hosted]]] = {}
    for member in fleet.members:
        for net in (item for item in member.load.hosted if item.kind == kinds.CONTROLNET):
            found.setdefault((net.name, net.digest, net.base), []).append((member, net))
    served = [_served(fleet, hosted) for hosted in found.values()]
    return tuple(sorted(served, key=lambda net: (net.name, -net.popularity, net.digest)))


def _served(fleet: fleet_pb2.ListMembersResponse, hosted: list[tuple[fleet_pb2.Member, Hosted]]) -> ServedControlNet:
    net = hosted[0][1]
    models = (model for member in fleet.members for model in member.registration.models)
    hosts = sorted((_host(member, one) for member, one in hosted), key=lambda host: (not host.server, host.name))
    return ServedControlNet(
        name=net.name,
        digest=net.digest,
        base=net.base,
        models=tuple(sorted({model.name for model in models if not net.base or model.base in ("", net.base)})),
        size_bytes=net.size_bytes,
        hosts=tuple(hosts),
        profiles=_profiles(one for _, one in hosted),
    )


def _profiles(hosted: Iterable[Hosted]) -> tuple[ResidualProfile, ...]:
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


def _host(member: fleet_pb2.Member, net: Hosted) -> ControlNetHost:
    return ControlNetHost(
        name=member.registration.name,
        address=member.registration.address,
        server=member.registration.kind == kinds.CONTROLNET,
        readiness=_READINESS.get(net.state, Readiness.UNKNOWN),
        popularity=net.popularity,
        sessions=net.sessions,
    )
