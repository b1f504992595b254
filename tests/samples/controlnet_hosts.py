"""ControlNets as hosts report them, and the hosts."""

from __future__ import annotations

from typing import Any

from bottega import kinds
from bottega.gateway.fleet.join_limits import JoinBounds
from bottega.v1 import fleet_pb2, hosted_pb2, image_pb2
from bottega.v1.hosted_pb2 import Hosted

ON_DISK = hosted_pb2.HOSTED_STATE_ON_DISK
LOADING = hosted_pb2.HOSTED_STATE_LOADING
LOADED = hosted_pb2.HOSTED_STATE_LOADED

BASE = "base of m"


def net(name: str = "edges", **facts: Any) -> Hosted:
    """A ControlNet for the model "m", loaded."""
    defaults = {"digest": f"hash of {name}", "base": BASE, "size_bytes": 1000, "state": LOADED}
    return Hosted(kind=kinds.CONTROLNET, name=name, **{**defaults, **facts})


def load(*nets: Hosted, draining: bool = False, budget_bytes: int = 0) -> fleet_pb2.Load:
    return fleet_pb2.Load(hosted=nets, draining=draining, budget_bytes=budget_bytes)


def server(name: str = "s1", port: int = 101) -> fleet_pb2.Registration:
    address = f"127.0.0.1:{port}"
    return fleet_pb2.Registration(kind=kinds.CONTROLNET, name=name, address=address, instance=instance(name, address))


def worker(
    name: str = "w1", model: str = "m", port: int = 1, *, base: str = BASE, **facts: Any
) -> fleet_pb2.Registration:
    """A worker of a model. facts: of the model."""
    address = f"127.0.0.1:{port}"
    models = [image_pb2.Model(name=model, base=base, **facts)]
    return fleet_pb2.Registration(
        kind=kinds.WORKER, name=name, address=address, models=models, instance=instance(name, address)
    )


def instance(name: str, address: str) -> str:
    """That of the process that has this name and listens there."""
    return f"{name} at {address}".ljust(16, ".")


def again(said: fleet_pb2.Registration) -> fleet_pb2.Registration:
    """What the same process says when it connects again; the gateway does not keep all of it."""
    return fleet_pb2.Registration(instance=instance(said.name, said.address), **_fields(said))


def _fields(said: fleet_pb2.Registration) -> dict[str, Any]:
    return {field.name: getattr(said, field.name) for field in said.DESCRIPTOR.fields if field.name != "instance"}


def bounds(max_members: int) -> JoinBounds:
    """Of a fleet where only the number of members matters."""
    return JoinBounds(
        max_members=max_members, max_members_per_peer=4000, joins_per_s=4000.0, joins_per_s_by_name=1000.0
    )
