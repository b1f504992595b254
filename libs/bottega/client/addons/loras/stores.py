"""The LoRA stores of a fleet: how they are called, and which of them has a LoRA, or is to have it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from bottega import rules
from bottega.client.addons.loras.addon import ADD_ON
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.types.messages import build_message
from bottega.errors import LoraNotFound, NoLora, Violation
from bottega.v1.fleet_pb2 import Registration
from bottega.v1.lora_pb2 import GetLoraRequest, ListLorasRequest, StoredLora
from bottega.v1.lora_pb2_grpc import LoraServiceStub

if TYPE_CHECKING:
    from bottega.v1.lora_pb2_grpc import LoraServiceAsyncStub

CALL_S = 20.0
STORES: ServiceCalls[LoraServiceAsyncStub] = ServiceCalls(add_on=ADD_ON, stub=LoraServiceStub, unavailable=NoLora)


def missing_lora(name: str) -> LoraNotFound:
    """What is raised where no store has it."""
    return LoraNotFound(f"no such LoRA: {name}", metadata={"loras": name})


async def find_lora(stores: Sequence[Registration], name: str) -> tuple[Registration, StoredLora]:
    """The store that has the LoRA, and what it says of it. Raises LoraNotFound, NoLora."""
    request = build_message(GetLoraRequest(), name=name)
    store, answer = await STORES.call_owner(
        stores, lambda stub: stub.GetLora(request, timeout=CALL_S), missing=missing_lora(name)
    )
    return store, answer.lora


async def choose_store(stores: Sequence[Registration], name: str, base: str | None) -> tuple[Registration, str]:
    """Where a LoRA of that name belongs, and its base: the store that has the name, else one that knows the base.

    base: absent where the stores know one alone; else InvalidRequest is raised.
    """
    bases = {store.name: await _bases(store) for store in stores}
    known = sorted({each for of_store in bases.values() for each in of_store})
    if base is None and len(known) != 1:
        rule = f"say which one: {', '.join(known) or 'the store has none'}"
        rules.refuse([Violation(field="base", description=rule)])
    base = known[0] if base is None else base
    if len(stores) > 1:
        with suppress(LoraNotFound):
            return (await find_lora(stores, name))[0], base
    return next((store for store in stores if base in bases[store.name]), stores[0]), base


async def _bases(store: Registration) -> Sequence[str]:
    async with STORES.open(store) as stub:
        return (await stub.ListLoras(ListLorasRequest(page_size=1), timeout=CALL_S)).bases
