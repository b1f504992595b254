"""The clients' methods about templates: recorded images, whose edits compute only the masked part.

Workers record templates and hold them in memory; activation stores keep them for all workers. A fleet usually has one
store. Several stores hold different templates, and the same profiles.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.addons.templates.overview import (
    STORE_S,
    STORES,
    WORKER_S,
    WORKERS,
    TemplateOverview,
    check_templates,
    look_over,
    stores_of,
    workers_of,
)
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.blocking import blocking
from bottega.client.sdk.sync import GatewayClient
from bottega.client.types.messages import build_message
from bottega.errors import BottegaError, ModelNotFound, NoWorker, Unavailable
from bottega.v1 import activations_pb2 as pb
from bottega.v1.activations_pb2 import BlockProfile, ProfileBlocksRequest
from bottega.v1.fleet_pb2 import ListMembersResponse, Member, Registration

if TYPE_CHECKING:
    from bottega.v1.activations_pb2_grpc import ActivationServiceAsyncStub


StubT = TypeVar("StubT")
AnswerT = TypeVar("AnswerT")


PROFILE_S = 600.0
"""That a measurement may take: it is some hundred forwards, which are slow without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredBlocks:
    """A profile, the worker that has measured it, the model's name, and the stores that keep it from now on."""

    profile: BlockProfile
    worker: str
    model: str
    stores: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedTemplates:
    """What is gone. stored: templates of stores. copies: of templates, in the memories of workers."""

    stored: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmedTemplates:
    """What is in memory. templates: of which all is, or on its way. loading_bytes: that are on their way."""

    templates: int
    loading_bytes: int


class AsyncTemplateMethods(AsyncGatewayClient):
    """What AsyncClient offers about templates of edits.

    What needs a store raises NoActivationStore without one that answers. id: of templates, 32 hexadecimal digits, or
    the first 8 or more of them, for all that begin so.
    """

    async def templates(self) -> TemplateOverview:
        """Which there are, and where: in stores and in workers. Without a store, what workers have.

        One that does not answer is named in the answer. Raises NoWorker, NoActivationStore where nobody answers.
        """
        return await look_over(await self.fleet())

    async def drop_templates(self, id: str = "") -> DroppedTemplates:
        """Has every store and every worker forget templates; an empty id drops all. What an edit uses now stays.

        All are asked, even if one fails: then its error is raised, and the others have forgotten theirs. Raises
        NoWorker, NoActivationStore, InvalidRequest.
        """
        request = build_message(pb.DropStoredTemplateRequest(), id=id)
        of_workers = pb.DropTemplateRequest(id=id)
        fleet = await self.fleet()
        stores, workers = stores_of(fleet), workers_of(fleet)
        if not (stores or workers):
            raise NoWorker("no worker has joined, and no activation store")
        # Stores first: a worker that asks for one again in between does not find it any more.
        stored = await _of_all(STORES, stores, lambda stub: stub.DropStoredTemplate(request, timeout=STORE_S))
        copies = await _of_all(WORKERS, workers, lambda stub: stub.DropTemplate(of_workers, timeout=WORKER_S))
        return DroppedTemplates(
            stored=sum(answer.dropped for answer in _answered(stored)),
            copies=sum(answer.dropped for answer in _answered(copies)),
        )

    async def pin_templates(self, id: str, pinned: bool = True) -> int:
        """Keeps templates from being evicted, or lets them go again; for how many that was done."""
        request = build_message(pb.PinTemplateRequest(), id=id, pinned=pinned)
        answers = await self._ask(lambda stub: stub.PinTemplate(request, timeout=STORE_S))
        return sum(answer.templates for answer in answers)

    async def warm_templates(self, id: str = "") -> WarmedTemplates:
        """Has stores bring templates from their disks into memory, as far as there is room; it does not wait for them.

        An empty id is all, those used last first. Asked again, it says what is still on its way.
        """
        request = build_message(pb.WarmTemplateRequest(), id=id)
        answers = await self._ask(lambda stub: stub.WarmTemplate(request, timeout=STORE_S))
        return WarmedTemplates(
            templates=sum(answer.templates for answer in answers),
            loading_bytes=sum(answer.loading_bytes for answer in answers),
        )

    async def block_profiles(self) -> tuple[BlockProfile, ...]:
        """What the blocks of models take, as it was measured; of several stores, the first one's count."""
        found: dict[tuple[str, str, int, int], BlockProfile] = {}
        request = pb.ListBlockProfilesRequest()
        for answer in await self._ask(lambda stub: stub.ListBlockProfiles(request, timeout=STORE_S)):
            for profile in answer.profiles:
                found.setdefault((profile.model_hash, profile.dtype, profile.width, profile.height), profile)
        return tuple(found[key] for key in sorted(found))

    async def set_block_profile(self, profile: BlockProfile) -> tuple[str, ...]:
        """Has every store keep a profile instead of that of the same model, element type and size; their names.

        One without blocks forgets it. Raises InvalidRequest, StorageUnavailable.
        """
        request = pb.SetBlockProfileRequest(profile=profile)
        stores = await self._stores()
        _answered(await _of_all(STORES, stores, lambda stub: stub.SetBlockProfile(request, timeout=STORE_S)))
        return tuple(store.name for store in stores)

    async def profile_blocks(
        self,
        *,
        model: str | None = None,
        worker: str | None = None,
        width: int = 0,
        height: int = 0,
        timeout_s: float = PROFILE_S,
    ) -> MeasuredBlocks:
        """Has a worker measure what each block of its model takes, and every store keep that.

        Stores keep of templates that are too large for their budget the blocks that save most time for each byte; which
        those are is measured. Without a store in the fleet it is measured all the same, and nobody keeps it.
        model: absent is the only one that is served. worker: that measures; absent is one that draws nothing now.
        width, height: of the picture, in pixels; 0 is the model's own. timeout_s: of the measurement.
        Raises ModelNotFound, NoWorker, and what set_block_profile raises.
        """
        fleet = await self.fleet()
        measured = await measure_blocks(
            fleet, model=model, worker=worker, width=width, height=height, timeout_s=timeout_s
        )
        if not stores_of(fleet):
            return measured
        return replace(measured, stores=await self.set_block_profile(measured.profile))

    async def _ask(self, call: Callable[[ActivationServiceAsyncStub], Awaitable[AnswerT]]) -> Sequence[AnswerT]:
        """Of every store; raises the first error once all have been asked."""
        return _answered(await _of_all(STORES, await self._stores(), call))

    async def _stores(self) -> Sequence[Registration]:
        return STORES.joined(await self.fleet())


async def _of_all(
    calls: ServiceCalls[StubT], services: Sequence[Registration], call: Callable[[StubT], Awaitable[AnswerT]]
) -> Sequence[AnswerT | BottegaError]:
    """What each of them answers, all asked at once, or why it does not."""

    async def one(service: Registration) -> AnswerT | BottegaError:
        try:
            async with calls.open(service) as stub:
                return await call(stub)
        except BottegaError as error:
            return error

    return await asyncio.gather(*map(one, services))


def _answered(answers: Sequence[AnswerT | BottegaError]) -> Sequence[AnswerT]:
    """Raises the first error among them."""
    for answer in answers:
        if isinstance(answer, BottegaError):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BottegaError)]


class TemplateMethods(GatewayClient):
    """What Client offers about templates of edits."""

    templates = blocking(AsyncTemplateMethods.templates)
    drop_templates = blocking(AsyncTemplateMethods.drop_templates)
    pin_templates = blocking(AsyncTemplateMethods.pin_templates)
    warm_templates = blocking(AsyncTemplateMethods.warm_templates)
    block_profiles = blocking(AsyncTemplateMethods.block_profiles)
    set_block_profile = blocking(AsyncTemplateMethods.set_block_profile)
    profile_blocks = blocking(AsyncTemplateMethods.profile_blocks)


async def measure_blocks(
    fleet: ListMembersResponse, *, model: str | None, worker: str | None, width: int, height: int, timeout_s: float
) -> MeasuredBlocks:
    """Waits for the worker's measurement, at most timeout_s; no store is told.

    model, worker: None leaves the choice. width, height: in pixels; 0 is the model's own.
    Raises ModelNotFound, NoWorker without one that may measure it, and Unavailable where that has no blocks to measure.
    """
    request = build_message(ProfileBlocksRequest(), width=width, height=height)
    chosen = _choose_worker(fleet, model, worker)
    async with WORKERS.open(chosen) as stub:
        answer = await stub.ProfileBlocks(request, timeout=timeout_s)
    if not answer.profile.blocks:
        raise Unavailable(f"worker {chosen.name} can measure no blocks of its model")
    name = next((each.name for each in chosen.models if each.model_hash == answer.profile.model_hash), "")
    return MeasuredBlocks(profile=answer.profile, worker=chosen.name, model=name or answer.profile.model_hash)


def _choose_worker(fleet: ListMembersResponse, model: str | None, worker: str | None) -> Registration:
    """Raises NoWorker where none is idle: what runs beside a measurement would be measured with it."""
    joined = [each for each in fleet.members if each.registration.kind == kinds.WORKER]
    workers = [each for each in joined if each.registration.models]  # others are starting
    served = sorted({each.name for one in workers for each in one.registration.models})
    if not workers:
        raise NoWorker("no worker has joined")
    if model is not None and model not in served:
        raise ModelNotFound(f"no such model: {model}", metadata={"served": ", ".join(served)})
    if model is None and worker is None and len(served) > 1:
        raise ModelNotFound(f"several models are served, say which: {', '.join(served)}")
    named = [each for each in workers if worker in (None, each.registration.name) and _serves(each, model)]
    if not named:
        whose = f"no worker {worker} has joined" if model is None else f"worker {worker} does not serve {model}"
        raise NoWorker(whose)
    idle = [each for each in named if not each.load.running and not each.load.draining]
    if not idle and worker is None:
        whose = "every worker" if len(named) > 1 else f"worker {named[0].registration.name}"
        raise NoWorker(f"{whose} draws now, and would measure that as well", metadata={"service": kinds.ACTIVATIONS})
    return (idle or named)[0].registration


def _serves(member: Member, model: str | None) -> bool:
    return model is None or any(each.name == model for each in member.registration.models)


ADD_ON = ClientAddOn(
    kind=kinds.ACTIVATIONS, title="activation store", hosted_title="templates of edits", check_fleet=check_templates
)
