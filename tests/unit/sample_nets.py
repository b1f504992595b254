"""ControlNets as hosts report them, and the hosts."""

from __future__ import annotations

from typing import Any

from bottega.v1 import controlnet_pb2, fleet_pb2, image_pb2
from bottega.v1.controlnet_pb2 import HostedControlNet

ON_DISK = controlnet_pb2.HOSTED_STATE_ON_DISK
LOADING = controlnet_pb2.HOSTED_STATE_LOADING
LOADED = controlnet_pb2.HOSTED_STATE_LOADED

BASE = "base of m"


def net(name: str = "edges", **facts: Any) -> HostedControlNet:
    """A ControlNet for the model "m", loaded."""
    defaults = {"digest": f"hash of {name}", "base": BASE, "size_bytes": 1000, "state": LOADED}
    return HostedControlNet(name=name, **{**defaults, **facts})


def load(*nets: HostedControlNet, draining: bool = False) -> fleet_pb2.Load:
    """The report of a host."""
    return fleet_pb2.Load(controlnets=nets, draining=draining)


def server(name: str = "s1", port: int = 101) -> fleet_pb2.Registration:
    """A ControlNet server."""
    return fleet_pb2.Registration(kind=fleet_pb2.SERVICE_KIND_CONTROLNET, name=name, address=f"127.0.0.1:{port}")


def worker(name: str = "w1", *, model: str = "m", base: str = BASE, port: int = 1) -> fleet_pb2.Registration:
    """A worker of a model."""
    return fleet_pb2.Registration(
        kind=fleet_pb2.SERVICE_KIND_WORKER,
        name=name,
        address=f"127.0.0.1:{port}",
        models=[image_pb2.Model(name=model, base=base)],
    )
