"""What LoRA stores have in quarantine, and how their operator brings it back or deletes it. Knows no pictures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from bottega.client.addons.loras.stores import LoraStores, asked
from bottega.client.types.messages import filled
from bottega.errors import BottegaError, InternalError, LoraNotFound, NoLora
from bottega.v1 import lora_pb2, lora_pb2_grpc
from bottega.v1.lora_pb2 import QuarantinedLora, RestoreLoraResponse

AnswerT = TypeVar("AnswerT")

_PAGE = 500
_MOST_PAGES = 200
_ASK_S = 20.0
# The first page has its store look over all of its files.
_LIST_S = 120.0
# All of a file is read and hashed.
_RESTORE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreQuarantine:
    """Of one store. folder: on its machine."""

    store: str
    folder: str
    loras: tuple[QuarantinedLora, ...]


async def quarantines(stores: LoraStores) -> tuple[StoreQuarantine, ...]:
    """What each store has, in the gateway's order. Raises NoLora where there is none, or one does not answer."""
    found = []
    for store in stores.here():
        loras: list[QuarantinedLora] = []
        async with asked(store) as stub:
            page = lora_pb2.ListQuarantineResponse()
            for _ in range(_MOST_PAGES):
                request = lora_pb2.ListQuarantineRequest(page_size=_PAGE, page_token=page.next_page_token)
                page = await stub.ListQuarantine(request, timeout=_LIST_S)
                loras += page.loras
                if not page.next_page_token:
                    break
            else:
                raise InternalError(
                    f"LoRA store {store.name} lists more than {_MOST_PAGES * _PAGE} LoRAs in quarantine, or does not "
                    "come to an end"
                )
        found.append(StoreQuarantine(store=store.name, folder=page.folder, loras=tuple(loras)))
    return tuple(found)


async def number_of(stores: LoraStores) -> int:
    """LoRAs that are in quarantine, in all stores, as they know without looking for more. Raises as `quarantines`."""
    number = 0
    for store in stores.here():
        async with asked(store) as stub:
            number += (await stub.ListLoras(lora_pb2.ListLorasRequest(page_size=1), timeout=_ASK_S)).quarantined
    return number


async def restore(stores: LoraStores, id: str, *, name: str, base: str) -> RestoreLoraResponse:
    """Brings one back, in the store that has it. Raises LoraNotFound, LoraExists, DataLoss, BadLora, InvalidRequest."""
    request = filled(lora_pb2.RestoreLoraRequest(), id=id, name=name, base=base)
    return await _in_the_one(stores, id, lambda stub: stub.RestoreLora(request, timeout=_RESTORE_S))


async def discard(stores: LoraStores, id: str) -> int:
    """Deletes one for good, in the store that has it; bytes that became free. Raises LoraNotFound."""
    request = filled(lora_pb2.DiscardLoraRequest(), id=id)
    answer = await _in_the_one(stores, id, lambda stub: stub.DiscardLora(request, timeout=_LIST_S))
    return answer.freed_bytes


async def _in_the_one(
    stores: LoraStores, id: str, call: Callable[[lora_pb2_grpc.LoraServiceAsyncStub], Awaitable[AnswerT]]
) -> AnswerT:
    failure: BottegaError = LoraNotFound(f"nothing in quarantine has the id {id}", metadata={"loras": id})
    for store in stores.here():
        try:
            async with asked(store) as stub:
                return await call(stub)
        except LoraNotFound:
            continue
        except NoLora as error:
            failure = error
    raise failure
