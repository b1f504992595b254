"""What add-ons tell each other about an attempt, as messages in the places that orders and decisions have for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bottega import kinds
from bottega.addons.cache.starts import parse_start
from bottega.v1.cache_pb2 import CacheDecision, CacheOrder, CacheStart
from bottega.v1.controlnet_pb2 import ControlNetHosts, ControlNetPlacements, ControlNetServer
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, Fidelity
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


def cache_order(*, fidelity: Fidelity.ValueType = FIDELITY_BALANCED, **fields: Any) -> dict[str, bytes]:
    """An order's add-ons, with what may be done with cached latents: read and record, where not said otherwise."""
    said = CacheOrder(**{"read": True, "record": True, "fidelity": fidelity, **fields})
    return {kinds.CACHE: said.SerializeToString()}


def starts_at(*starts: str) -> dict[str, bytes]:
    """The decision that pictures start from these, "ENTRY@STEP" each, or empty for noise."""
    named = [parse_start(start) if start else ("", 0) for start in starts]
    decision = CacheDecision(starts=[CacheStart(entry=entry, step=step) for entry, step in named])
    return {kinds.CACHE: decision.SerializeToString()}


def _message(hosts: Any) -> ControlNetHosts:
    servers = [ControlNetServer(name=server.name, address=server.address) for server in hosts.servers]
    return ControlNetHosts(digest=hosts.digest, servers=servers, similarity=hosts.similarity)
