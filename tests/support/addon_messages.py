"""What add-ons tell each other about an attempt, as messages in the places that orders and decisions have for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bottega import kinds
from bottega.v1.controlnet_pb2 import ControlNetHosts, ControlNetPlacements, ControlNetServer
from bottega.v1.lora_pb2 import LoraDecision


def placed(hosts: Iterable[Any]) -> dict[str, bytes]:
    """An order's add-ons, with its ControlNets there. hosts: ControlHosts, or ControlNetHosts."""
    messages = [each if isinstance(each, ControlNetHosts) else _message(each) for each in hosts]
    return {kinds.CONTROLNET: ControlNetPlacements(hosts=messages).SerializeToString()}


def placements(addons: Mapping[str, bytes]) -> Sequence[ControlNetHosts]:
    """Where an order's ControlNets are; none where it has none."""
    return ControlNetPlacements.FromString(addons.get(kinds.CONTROLNET, b"")).hosts


def loras_at(step: int) -> dict[str, bytes]:
    """The decision that LoRAs go in at this step."""
    return {kinds.LORAS: LoraDecision(step=step).SerializeToString()}


def _message(hosts: Any) -> ControlNetHosts:
    servers = [ControlNetServer(name=server.name, address=server.address) for server in hosts.servers]
    return ControlNetHosts(digest=hosts.digest, servers=servers, similarity=hosts.similarity)
