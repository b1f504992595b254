"""The SDK's methods about LoRAs: those in the stores, the quarantine, and measuring how late one may be loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from bottega import kinds
from bottega.addons.loras.client.stores import (
    CALL_S,
    IMPORT_S,
    STORES,
    choose_store,
    find_lora,
    missing_lora,
    read_lora,
    upload,
)
from bottega.addons.loras.client.types import (
    LoraBoundMeasured,
    LoraInQuarantine,
    RestoreResult,
    StoredLora,
    StoreQuarantine,
    quarantined_from,
    stored_from,
)
from bottega.client.addons.addon import ClientAddOn, all_pages
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.sync import GatewayClient, blocking
from bottega.client.types.fleet import FleetMember
from bottega.client.types.inputs import Lora
from bottega.client.types.messages import as_list, build_message, describe
from bottega.client.types.picture import Picture
from bottega.client.types.provenance import LoraUse
from bottega.errors import InternalError, LoraNotFound, LoraUnusable, Violation
from bottega.rules import refuse
from bottega.v1 import lora_pb2

if TYPE_CHECKING:
    from bottega.v1.lora_pb2_grpc import LoraServiceAsyncStub

AnswerT = TypeVar("AnswerT")

_PAGE_SIZE = 500
# For the first page of a quarantine, a store looks at all of its files.
_QUARANTINE_S = 120.0
# A store reads and hashes the whole file.
_RESTORE_S = 600.0

LEAST_PROMPTS = 4
"""Minimum number of prompts for a profile, because results vary between prompts."""

_SEEDS = 2
# Below this cosine between the latents with and without a LoRA, the picture without it has become another one.
_LEAST_LATENT_SIMILARITY = 0.99


class AsyncLoraMethods(AsyncGatewayClient):
    """The methods of AsyncClient about LoRAs. All raise NoLora if no store has joined, or if one does not answer."""

    async def loras(self) -> tuple[StoredLora, ...]:
        """Return the LoRAs of the suite by name. If several stores have a name, the first store's is returned."""
        found: dict[str, StoredLora] = {}
        for store in await self._lora_stores():
            request = lora_pb2.ListLorasRequest(page_size=_PAGE_SIZE)
            async with STORES.open(store) as stub:
                async for page in all_pages(stub.ListLoras, request, timeout_s=CALL_S, what=f"LoRA store {store.name}"):
                    for lora in page.loras:
                        found.setdefault(lora.name, stored_from(lora))
        return tuple(found[name] for name in sorted(found))

    async def lora(self, name: str) -> StoredLora:
        """Return one LoRA. Raise LoraNotFound if no store has it."""
        request = build_message(lora_pb2.GetLoraRequest(), name=name)
        return stored_from((await self._call_owner(name, lambda stub: stub.GetLora(request, timeout=CALL_S))).lora)

    async def add_lora(
        self,
        name: str,
        path: Path,
        *,
        base: str | None = None,
        trigger_words: Sequence[str] = (),
        allow_partial: bool = False,
    ) -> StoredLora:
        """Upload a LoRA, or a textual inversion embedding.

        Args:
            name: Name of the LoRA in requests.
            path: A safetensors file, or a folder of PEFT or Diffusers.
            base: Name of the model that it was made for; None if the stores have only one base model.
            trigger_words: Words in a prompt that invoke its style. If the LoRA exists, they replace its trigger words.
                An embedding has one, its token; by default that of its file, or its name in small letters.
            allow_partial: Whether layers of its file that match nothing in the model are ignored instead of refused.
        """
        build_message(lora_pb2.UploadLoraHead(), name=name, trigger_words=trigger_words)  # before anything is read
        files, head = await asyncio.to_thread(read_lora, path)
        store, base = await choose_store(await self._lora_stores(), name, base)
        build_message(head, name=name, base=base, trigger_words=trigger_words, allow_partial=allow_partial)
        return stored_from(await upload(store, head, files))

    async def register_lora(
        self,
        name: str,
        path: str,
        *,
        base: str | None = None,
        trigger_words: Sequence[str] = (),
        allow_partial: bool = False,
    ) -> StoredLora:
        """Make a store import a LoRA from the store's own machine.

        Args:
            name: Name of the LoRA in requests.
            path: A file or folder on the store's machine, below the root that its configuration allows.
            base: As in add_lora().
            trigger_words: As in add_lora().
            allow_partial: As in add_lora().
        """
        request = build_message(
            lora_pb2.RegisterLoraRequest(),
            name=name,
            path=path,
            trigger_words=trigger_words,
            allow_partial=allow_partial,
        )
        store, base = await choose_store(await self._lora_stores(), name, base)
        build_message(request, base=base)
        async with STORES.open(store) as stub:
            return stored_from((await stub.RegisterLora(request, timeout=IMPORT_S)).lora)

    async def remove_lora(self, name: str) -> None:
        """Delete a LoRA. Raise LoraNotFound if no store has it, LoraInUse if a request uses it."""
        request = build_message(lora_pb2.DeleteLoraRequest(), name=name)
        await self._call_owner(name, lambda stub: stub.DeleteLora(request, timeout=CALL_S))

    async def pin_lora(self, name: str, pinned: bool = True) -> StoredLora:
        """Pin a LoRA in its store's memory, or unpin it. The result's `readiness` says whether it is loaded yet."""
        request = build_message(lora_pb2.PinLoraRequest(), name=name, pinned=pinned)
        return stored_from((await self._call_owner(name, lambda stub: stub.PinLora(request, timeout=CALL_S))).lora)

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
        """Measure how many steps may be made before a LoRA is loaded; its store keeps the result.

        Two pictures of each prompt are drawn, each with and without the LoRA. The bound is the first step after which
        the cosine between the latents is below .99, in any picture. While the LoRA is not yet at the worker, a request
        may make the steps before the bound without it; the bound scales with the number of steps. The request must
        allow that, by fidelity or bounded_lora_loading.

        Args:
            name: Name of the LoRA.
            prompts: At least four, of the kind that the LoRA is used with, including its trigger words.
            scale: The strongest scale that you use.
            num_inference_steps: Steps of the pictures; None for the model's default.
            model: Name of the model; None for the one that the LoRA was made for.
            on_prompt: Called with the bound of each prompt.
        """
        measured = await _measure(
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
        """Make each store look for LoRA files that its catalogue does not contain, and return these."""
        found = []
        for store in await self._lora_stores():
            request, what = lora_pb2.ListQuarantineRequest(page_size=_PAGE_SIZE), f"The quarantine of {store.name}"
            loras: list[LoraInQuarantine] = []
            async with STORES.open(store) as stub:
                async for page in all_pages(stub.ListQuarantine, request, timeout_s=_QUARANTINE_S, what=what):
                    loras += map(quarantined_from, page.loras)
            found.append(StoreQuarantine(store=store.name, folder=page.folder, loras=tuple(loras)))
        return tuple(found)

    async def loras_in_quarantine(self) -> int:
        """Return the number of LoRAs known to be in quarantine, without making the stores look for more."""
        number = 0
        for store in await self._lora_stores():
            async with STORES.open(store) as stub:
                number += (await stub.ListLoras(lora_pb2.ListLorasRequest(page_size=1), timeout=CALL_S)).quarantined
        return number

    async def restore_lora(self, id: str, *, name: str = "", base: str = "") -> RestoreResult:
        """Restore a LoRA from quarantine.

        Args:
            id: ID of the LoRA in the quarantine.
            name: Name of the LoRA in requests; empty for its known name, else one made from its digest.
            base: Name of the model that it was made for; empty for the known one, else the only one that it fits.

        Raises:
            LoraNotFound: Nothing in quarantine has this ID.
            LoraExists: Another LoRA has this name.
            DataLoss: The files are damaged.
            BadLora: The files are no LoRA that can be used.
            InvalidRequest: The name or the base is invalid.
        """
        request = build_message(lora_pb2.RestoreLoraRequest(), id=id, name=name, base=base)
        answer = await self._call_quarantine(id, lambda stub: stub.RestoreLora(request, timeout=_RESTORE_S))
        return RestoreResult(lora=stored_from(answer.lora), unknown=tuple(answer.unknown))

    async def discard_lora(self, id: str) -> int:
        """Delete a LoRA in quarantine for good, and return how many bytes were freed. Raise LoraNotFound."""
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

    async def _lora_stores(self) -> Sequence[FleetMember]:
        return STORES.joined(await self.fleet())


class LoraMethods(GatewayClient):
    """The methods of Client about LoRAs."""

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


async def _measure(
    client: AsyncGatewayClient,
    name: str,
    prompts: Sequence[str],
    *,
    scale: float,
    num_inference_steps: int | None,
    model: str | None,
    on_prompt: Callable[[int], None],
) -> LoraBoundMeasured:
    """Draw pictures of one prompt after the other, each with two seeds, and return the measured bound.

    Raises:
        InvalidRequest: There are too few prompts.
        LoraUnusable: The LoRA was replaced meanwhile, or was not measured.
        BottegaError: Drawing failed.
    """
    refuse(list(_check_prompts(prompts)))
    lora = Lora(name, scale, measure_similarity=True)
    bounds: list[int] = []
    digests: set[str] = set()
    for number, prompt in enumerate(prompts):
        picture, *_ = await client.generate_many(
            prompt, _SEEDS, seed=_SEEDS * number, model=model, num_inference_steps=num_inference_steps, lora=[lora]
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
    others = [prompt for prompt in given if not isinstance(prompt, str)]
    if others:
        yield Violation(field="prompts", description=f"must be texts; got {describe(others[0])}")
    elif len(set(given)) < LEAST_PROMPTS:
        rule = f"at least {LEAST_PROMPTS} different ones are needed: results vary between prompts"
        yield Violation(field="prompts", description=rule)


def _measured_use(picture: Picture, name: str) -> LoraUse:
    """Return the provenance's entry of the LoRA. Raise LoraUnusable if the worker did not measure similarities."""
    if len(picture.provenance.loras) != 1:
        raise InternalError(f"the picture's provenance does not say what {name} changed by itself")
    use = picture.provenance.loras[0]
    if not use.similarities:
        raise LoraUnusable(
            f"worker {picture.provenance.worker} did not compare latents with and without the LoRA {name}; "
            "it may run an earlier version",
            metadata={"lora": name},
        )
    return use


ADD_ON = ClientAddOn(kind=kinds.LORAS, title="LoRA store", hosted_title="LoRAs")


def latest_step(similarities: Sequence[float]) -> int:
    """Return the first step after which the latent without the LoRA differs too much; the number of steps if none does.

    Source: Katz, bounded asynchronous loading: the bound is where the latents begin to differ.

    Args:
        similarities: After each step, the cosine between the latents with and without the LoRA.
    """
    return next(
        (step for step, cosine in enumerate(similarities) if not cosine >= _LEAST_LATENT_SIMILARITY), len(similarities)
    )
