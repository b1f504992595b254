"""The servers of a job's ControlNets, which the gateway sends with the attempt."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.message import DecodeError

from bottega import kinds, rules
from bottega.addons.controlnets.engine.provider import ControlHosts, ControlServer
from bottega.errors import InvalidRequest, Violation
from bottega.v1.controlnet_pb2 import ControlNetHosts, ControlNetPlacements

HOSTS_FIELD = f"addons[{kinds.CONTROLNET}].hosts"

_MAX_DIGEST_CHARACTERS = 128
_MAX_NAME_CHARACTERS = 128
_MAX_ADDRESS_CHARACTERS = 300
# Maximum number of servers for one ControlNet of a job.
_MAX_SERVERS = 64


def read_hosts(data: bytes) -> tuple[ControlHosts, ...]:
    """Return the servers of each ControlNet in the spec. Raise InvalidRequest with all violations.

    Args:
        data: Serialized ControlNetPlacements; empty if the gateway sent none.
    """
    try:
        placements = ControlNetPlacements.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"addons[{kinds.CONTROLNET}] is no ControlNetPlacements") from None
    rules.refuse([wrong for index, hosts in enumerate(placements.hosts) for wrong in _check(index, hosts)])
    return tuple(
        ControlHosts(
            digest=hosts.digest,
            servers=tuple(ControlServer(name=server.name, address=server.address) for server in hosts.servers),
            similarity=hosts.similarity if hosts.HasField("similarity") else None,
        )
        for hosts in placements.hosts
    )


def _check(index: int, hosts: ControlNetHosts) -> Iterator[Violation]:
    path = f"{HOSTS_FIELD}[{index}]"
    if len(hosts.digest) > _MAX_DIGEST_CHARACTERS:
        yield Violation(field=f"{path}.digest", description=f"must be at most {_MAX_DIGEST_CHARACTERS} characters")
    if len(hosts.servers) > _MAX_SERVERS or any(
        not 0 < len(server.name) <= _MAX_NAME_CHARACTERS or not 0 < len(server.address) <= _MAX_ADDRESS_CHARACTERS
        for server in hosts.servers
    ):
        rule = f"must be at most {_MAX_SERVERS}, each with a name and an address"
        yield Violation(field=f"{path}.servers", description=rule)
    if not rules.is_cosine(hosts.similarity):
        yield Violation(field=f"{path}.similarity", description="must be a cosine, -1 to 1")
