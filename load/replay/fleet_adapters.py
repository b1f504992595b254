"""The ControlNets and LoRAs that a fleet has for a model: what a mix's requests may name."""

from __future__ import annotations

from bottega import kinds
from bottega.client import AsyncClient, ServedModel


async def controlnets_for(client: AsyncClient, model: ServedModel) -> tuple[str, ...]:
    """Names. Raises BottegaError where the fleet does not answer."""
    return tuple(dict.fromkeys(net.name for net in await client.controlnets() if model.name in net.models))


async def loras_for(client: AsyncClient, model: ServedModel) -> tuple[str, ...]:
    """Names; none where no store has joined. Raises BottegaError where the fleet or a store does not answer."""
    fleet = await client.fleet()
    if not any(member.kind == kinds.LORAS for member in fleet.members):
        return ()
    return tuple(lora.name for lora in await client.loras() if lora.base == model.name)
