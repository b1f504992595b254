"""The clients' methods about LoRAs: those in the stores, their quarantine, and how late one may arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn
from bottega.client.addons.loras.stores import (
    CALL_S,
    IMPORT_S,
    STORES,
    choose_store,
    find_lora,
    missing_lora,
    read_lora,
    upload,
)
from bottega.client.addons.service_calls import all_pages
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.blocking import blocking
from bottega.client.sdk.sync import GatewayClient
from bottega.client.types.lora import Lora
from bottega.client.types.messages import as_list, build_message, describe
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import LoraUse
from bottega.errors import InternalError, LoraNotFound, LoraUnusable, Violation
from bottega.planning import latest_step
from bottega.rules import refuse
from bottega.v1 import lora_pb2
from bottega.v1.fleet_pb2 import Registration
from bottega.v1.lora_pb2 import QuarantinedLora, RestoreLoraResponse, StoredLora

if TYPE_CHECKING:
    from bottega.v1.lora_pb2_grpc import LoraServiceAsyncStub


AnswerT = TypeVar("AnswerT")

_PAGE_SIZE = 500
# The first page of a quarantine has its store look over all of its files.
_QUARANTINE_S = 120.0
# All of a file is read and hashed.
_RESTORE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreQuarantine:
    """What one store has in quarantine. folder: on its machine."""

    store: str
    folder: str
    loras: tuple[QuarantinedLora, ...]


class AsyncLoraMethods(AsyncGatewayClient):
    """What AsyncClient offers about LoRAs."""

    async def loras(self) -> tuple[StoredLora, ...]:
        """The LoRAs that the suite has, by name, as the contract describes them."""
        found: dict[str, StoredLora] = {}
        for store in await self._lora_stores():
            request = lora_pb2.ListLorasRequest(page_size=_PAGE_SIZE)
            async with STORES.open(store) as stub:
                async for page in all_pages(stub.ListLoras, request, timeout_s=CALL_S, what=f"LoRA store {store.name}"):
                    for lora in page.loras:
                        found.setdefault(lora.name, lora)
        return tuple(found[name] for name in sorted(found))

    async def lora(self, name: str) -> StoredLora:
        """One LoRA of the suite."""
        request = build_message(lora_pb2.GetLoraRequest(), name=name)
        return (await self._call_owner(name, lambda stub: stub.GetLora(request, timeout=CALL_S))).lora

    async def add_lora(
        self, name: str, path: Path, *, base: str | None = None, trigger_words: Sequence[str] = ()
    ) -> StoredLora:
        """Uploads a LoRA: a safetensors file, or a folder of PEFT or Diffusers.

        base: the model that it was made for; absent where the store knows one alone. trigger_words: those of one that
        is there already change, where some are given.
        """
        build_message(lora_pb2.UploadLoraHead(), name=name, trigger_words=trigger_words)  # before anything is read
        files, head = await asyncio.to_thread(read_lora, path)
        store, base = await choose_store(await self._lora_stores(), name, base)
        build_message(head, name=name, base=base, trigger_words=trigger_words)
        return await upload(store, head, files)

    async def register_lora(
        self, name: str, path: str, *, base: str | None = None, trigger_words: Sequence[str] = ()
    ) -> StoredLora:
        """Has the store take in a file or folder of its own machine, below the root that its configuration allows."""
        request = build_message(lora_pb2.RegisterLoraRequest(), name=name, path=path, trigger_words=trigger_words)
        store, base = await choose_store(await self._lora_stores(), name, base)
        build_message(request, base=base)
        async with STORES.open(store) as stub:
            return (await stub.RegisterLora(request, timeout=IMPORT_S)).lora

    async def remove_lora(self, name: str) -> None:
        """Forgets a LoRA. Raises LoraNotFound, LoraInUse."""
        request = build_message(lora_pb2.DeleteLoraRequest(), name=name)
        await self._call_owner(name, lambda stub: stub.DeleteLora(request, timeout=CALL_S))

    async def pin_lora(self, name: str, pinned: bool = True) -> StoredLora:
        """Keeps a LoRA in the store's memory, or no longer. Its state says whether it is there yet."""
        request = build_message(lora_pb2.PinLoraRequest(), name=name, pinned=pinned)
        return (await self._call_owner(name, lambda stub: stub.PinLora(request, timeout=CALL_S))).lora

    async def profile_lora(
        self,
        name: str,
        prompts: Sequence[str],
        *,
        scale: float = 1.0,
        num_inference_steps: int | None = None,
        model: str | None = None,
        on_prompt: Callable[[int], None] = lambda _: None,
    ) -> LoraBoundMeasured:
        """Draws two pictures of each prompt with the LoRA and without, and has the store remember how late it may come.

        That is the first step after which the latents' cosine is below .99, in the worst of the pictures. Requests that
        allow it (by their fidelity, or bounded_lora_loading) then make that many steps of this number of steps without
        it, at most, where it is not at the worker yet; those of another number, in proportion.
        prompts: at least four, of the kind that the LoRA is used with, its trigger words included.
        scale: the strongest that you use it with. num_inference_steps: of the pictures; absent is the model's default.
        on_prompt: told the step of each.
        """
        measured = await measure_lora(
            self,
            name,
            prompts,
            scale=scale,
            num_inference_steps=num_inference_steps,
            model=model,
            on_prompt=on_prompt,
        )
        store, known = await find_lora(await self._lora_stores(), name)
        bounds = {bound.num_inference_steps: bound.max_step for bound in known.bounds}
        bounds[measured.num_inference_steps] = measured.max_step
        request = lora_pb2.SetLoraProfileRequest(name=name, digest=measured.digest)
        for steps, step in sorted(bounds.items()):
            request.bounds.add(num_inference_steps=steps, max_step=step)
        async with STORES.open(store) as stub:
            await stub.SetLoraProfile(request, timeout=CALL_S)
        return measured

    async def lora_quarantines(self) -> tuple[StoreQuarantine, ...]:
        """Files of each LoRA store that its catalogue does not list; the store looks for them first."""
        found = []
        for store in await self._lora_stores():
            request, what = lora_pb2.ListQuarantineRequest(page_size=_PAGE_SIZE), f"The quarantine of {store.name}"
            loras: list[QuarantinedLora] = []
            async with STORES.open(store) as stub:
                async for page in all_pages(stub.ListQuarantine, request, timeout_s=_QUARANTINE_S, what=what):
                    loras += page.loras
            found.append(StoreQuarantine(store=store.name, folder=page.folder, loras=tuple(loras)))
        return tuple(found)

    async def loras_in_quarantine(self) -> int:
        """How many LoRAs are there, as far as their stores know without looking for more."""
        number = 0
        for store in await self._lora_stores():
            async with STORES.open(store) as stub:
                number += (await stub.ListLoras(lora_pb2.ListLorasRequest(page_size=1), timeout=CALL_S)).quarantined
        return number

    async def restore_lora(self, id: str, *, name: str = "", base: str = "") -> RestoreLoraResponse:
        """Brings a LoRA back from quarantine; the answer says what of it could not be known.

        name, base: empty is what is known of it, else a name made of its digest, and the one base that it fits.
        Raises LoraNotFound, LoraExists, DataLoss, BadLora, InvalidRequest.
        """
        request = build_message(lora_pb2.RestoreLoraRequest(), id=id, name=name, base=base)
        return await self._call_quarantine(id, lambda stub: stub.RestoreLora(request, timeout=_RESTORE_S))

    async def discard_lora(self, id: str) -> int:
        """Deletes a LoRA from quarantine, for good; bytes that became free. Raises LoraNotFound."""
        request = build_message(lora_pb2.DiscardLoraRequest(), id=id)
        answer = await self._call_quarantine(id, lambda stub: stub.DiscardLora(request, timeout=_QUARANTINE_S))
        return answer.freed_bytes

    async def _call_owner(self, name: str, call: Callable[[LoraServiceAsyncStub], Awaitable[AnswerT]]) -> AnswerT:
        _, answer = await STORES.call_owner(await self._lora_stores(), call, missing=missing_lora(name))
        return answer

    async def _call_quarantine(self, id: str, call: Callable[[LoraServiceAsyncStub], Awaitable[AnswerT]]) -> AnswerT:
        missing = LoraNotFound(f"nothing in quarantine has the id {id}", metadata={"loras": id})
        _, answer = await STORES.call_owner(await self._lora_stores(), call, missing=missing)
        return answer

    async def _lora_stores(self) -> Sequence[Registration]:
        """Of several LoRAs that have a name, the first store's counts."""
        return STORES.joined(await self.fleet())


class LoraMethods(GatewayClient):
    """What Client offers about LoRAs."""

    loras = blocking(AsyncLoraMethods.loras)
    lora = blocking(AsyncLoraMethods.lora)
    add_lora = blocking(AsyncLoraMethods.add_lora)
    register_lora = blocking(AsyncLoraMethods.register_lora)
    remove_lora = blocking(AsyncLoraMethods.remove_lora)
    pin_lora = blocking(AsyncLoraMethods.pin_lora)
    profile_lora = blocking(AsyncLoraMethods.profile_lora)
    lora_quarantines = blocking(AsyncLoraMethods.lora_quarantines)
    loras_in_quarantine = blocking(AsyncLoraMethods.loras_in_quarantine)
    restore_lora = blocking(AsyncLoraMethods.restore_lora)
    discard_lora = blocking(AsyncLoraMethods.discard_lora)


# One picture says little of the next one: the least that a profile is made of.
LEAST_PROMPTS = 4
SEEDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBoundMeasured:
    """How late the LoRA of that digest may come into requests of so many steps: max_step, see client.Lora.

    prompts: of each, the bound that its own pictures have; max_step is the least of them.
    """

    digest: str
    num_inference_steps: int
    max_step: int
    prompts: tuple[int, ...]


async def measure_lora(
    client: AsyncGatewayClient,
    name: str,
    prompts: Sequence[str],
    *,
    scale: float,
    num_inference_steps: int | None,
    model: str | None,
    on_prompt: Callable[[int], None],
) -> LoraBoundMeasured:
    """Pictures of one prompt after the other, each with two seeds. on_prompt: told the bound of each.

    Raises InvalidRequest for too few prompts, LoraUnusable where the LoRA is replaced meanwhile, and what drawing
    raises.
    """
    refuse(list(_check_prompts(prompts)))
    lora = Lora(name, scale, measure_similarity=True)
    bounds: list[int] = []
    digests: set[str] = set()
    for number, prompt in enumerate(prompts):
        picture, *_ = await client.generate_many(
            prompt, SEEDS, seed=SEEDS * number, model=model, num_inference_steps=num_inference_steps, lora=[lora]
        )
        use = _measured_use(picture, name)
        digests.add(use.digest)
        bounds.append(latest_step(use.similarities))
        on_prompt(bounds[-1])
    if len(digests) > 1:
        raise LoraUnusable(f"{name} was replaced between two pictures: measure again", metadata={"lora": name})
    return LoraBoundMeasured(
        digest=digests.pop(),
        num_inference_steps=picture.provenance.parameters.num_inference_steps,
        max_step=min(bounds),
        prompts=tuple(bounds),
    )


def _check_prompts(prompts: object) -> Iterator[Violation]:
    given = as_list(prompts, name="prompts", what="texts")
    wrong = [prompt for prompt in given if not isinstance(prompt, str)]
    if wrong:
        yield Violation(field="prompts", description=f"must be texts; got {describe(wrong[0])}")
    elif len(set(given)) < LEAST_PROMPTS:
        rule = f"at least {LEAST_PROMPTS} different ones are needed: one picture says little of the next"
        yield Violation(field="prompts", description=rule)


def _measured_use(picture: Picture, name: str) -> LoraUse:
    """Raises LoraUnusable where nothing was measured, InternalError where it is not the one that was asked for."""
    if len(picture.provenance.loras) != 1:
        raise InternalError(f"the picture's provenance has no entry for {name} by itself")
    use = picture.provenance.loras[0]
    if not use.similarities:
        raise LoraUnusable(
            f"worker {picture.provenance.worker} did not measure {name}: is it of an earlier version?",
            metadata={"lora": name},
        )
    return use


ADD_ON = ClientAddOn(kind=kinds.LORAS, title="LoRA store", hosted_title="LoRAs")
