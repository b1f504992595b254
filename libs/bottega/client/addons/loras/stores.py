"""The LoRA stores of a fleet: how they are called, and which of them has a LoRA, or is to have it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from bottega import kinds, rules
from bottega.client.addons.loras.addon import ADD_ON
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.types.messages import build_message
from bottega.errors import BottegaError, LoraNotFound, NoLora, Violation
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration
from bottega.v1.lora_pb2 import GetLoraRequest, ListLorasRequest, StoredLora
from bottega.v1.lora_pb2_grpc import LoraServiceStub

if TYPE_CHECKING:
    from bottega.v1.lora_pb2_grpc import LoraServiceAsyncStub

CALL_S = 20.0
STORES: ServiceCalls[LoraServiceAsyncStub] = ServiceCalls(add_on=ADD_ON, stub=LoraServiceStub, unavailable=NoLora)

AnswerT = TypeVar("AnswerT")


def lora_stores(fleet: ListMembersResponse) -> Sequence[Registration]:
    """In the gateway's order, those that drain last: of several LoRAs that have a name, the first store's counts.

    Raises NoLora where there is no store.
    """
    members = [member for member in fleet.members if member.registration.kind == kinds.LORAS]
    if not members:
        raise NoLora("no LoRA store has joined; bottega fleet shows who has")
    return [member.registration for member in sorted(members, key=lambda member: member.load.draining)]


async def call_owner(
    stores: Sequence[Registration],
    call: Callable[[LoraServiceAsyncStub], Awaitable[AnswerT]],
    *,
    missing: LoraNotFound,
) -> tuple[Registration, AnswerT]:
    """The store that has what `call` asks for, and its answer. missing: raised where none has it.

    Raises NoLora where one that may have it does not answer.
    """
    failure: BottegaError = missing
    for store in stores:
        try:
            async with STORES.open(store) as stub:
                return store, await call(stub)
        except LoraNotFound:
            continue
        except NoLora as error:
            failure = error
    raise failure


def missing_lora(name: str) -> LoraNotFound:
    """What is raised where no store has it."""
    return LoraNotFound(f"no such LoRA: {name}", metadata={"loras": name})


async def find_lora(stores: Sequence[Registration], name: str) -> tuple[Registration, StoredLora]:
    """The store that has the LoRA, and what it says of it. Raises LoraNotFound, NoLora."""
    request = build_message(GetLoraRequest(), name=name)
    answered = await call_owner(stores, lambda stub: stub.GetLora(request, timeout=CALL_S), missing=missing_lora(name))
    store, answer = answered
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
