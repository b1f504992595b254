"""The SDK's methods about templates: recorded activations of an image, with which edits compute only the masked part.

Workers record templates and have them in memory; activation stores keep them for all workers. A fleet usually has one
store. Several stores have different templates, but the same profiles.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from bottega import kinds
from bottega.addons.edits.client.overview import (
    STORE_S,
    STORES,
    WORKER_S,
    WORKERS,
    check_templates,
    look_over,
    ready_workers,
)
from bottega.addons.edits.client.types import (
    BlockProfile,
    DroppedTemplates,
    MeasuredBlocks,
    TemplateOverview,
    WarmedTemplates,
    profile_from,
    profile_to_wire,
)
from bottega.client.addons.addon import ClientAddOn, answered
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.sync import GatewayClient, blocking
from bottega.client.types.fleet import FleetMember, FleetStatus
from bottega.client.types.messages import build_message
from bottega.errors import ModelNotFound, NoWorker, Unavailable
from bottega.v1 import activations_pb2 as pb

if TYPE_CHECKING:
    from bottega.v1.activations_pb2_grpc import ActivationServiceAsyncStub

AnswerT = TypeVar("AnswerT")

PROFILE_S = 600.0
"""Default time-out in seconds of a measurement, which makes some hundred forward passes."""


class AsyncEditMethods(AsyncGatewayClient):
    """The methods of AsyncClient about templates of edits.

    Methods that need a store raise NoActivationStore if none has joined, or one does not answer. The argument `id` is
    the ID of a template, 32 hex digits, or its first digits, at least 8, which select all templates that begin with
    them.
    """

    async def templates(self) -> TemplateOverview:
        """Return the templates of all stores and workers, and how much space each service has for templates.

        The result names services that did not answer. Raises NoWorker or NoActivationStore if none answers.
        """
        return await look_over(await self.fleet())

    async def drop_templates(self, id: str = "") -> DroppedTemplates:
        """Delete templates in every store and every worker, except those that an edit uses now.

        Every service is asked. If one fails, its error is raised after the others have deleted their templates.

        Args:
            id: The ID of a template or its first digits; empty for all templates.

        Raises:
            NoWorker: No service that could have templates has joined.
            InvalidRequest: The ID is invalid.
        """
        request = build_message(pb.DropStoredTemplateRequest(), id=id)
        worker_request = pb.DropTemplateRequest(id=id)
        fleet = await self.fleet()
        stores, workers = fleet.of_kind(kinds.ACTIVATIONS), ready_workers(fleet)
        if not (stores or workers):
            raise NoWorker("no worker and no activation store has joined")
        # Stores first, so that a worker cannot fetch a dropped template again.
        stored = await STORES.call_all(stores, lambda stub: stub.DropStoredTemplate(request, timeout=STORE_S))
        copies = await WORKERS.call_all(workers, lambda stub: stub.DropTemplate(worker_request, timeout=WORKER_S))
        return DroppedTemplates(
            stored=sum(answer.dropped for answer in answered(stored)),
            copies=sum(answer.dropped for answer in answered(copies)),
        )

    async def pin_templates(self, id: str, pinned: bool = True) -> int:
        """Keep templates from being evicted, or allow it again. Return the number of matching templates."""
        request = build_message(pb.PinTemplateRequest(), id=id, pinned=pinned)
        answers = await self._ask(lambda stub: stub.PinTemplate(request, timeout=STORE_S))
        return sum(answer.templates for answer in answers)

    async def warm_templates(self, id: str = "") -> WarmedTemplates:
        """Make stores load templates from disk into memory as far as they fit, without waiting until they are loaded.

        Call it again to see how many bytes are still being loaded.

        Args:
            id: The ID of a template or its first digits; empty for all templates, the most recently used first.
        """
        request = build_message(pb.WarmTemplateRequest(), id=id)
        answers = await self._ask(lambda stub: stub.WarmTemplate(request, timeout=STORE_S))
        return WarmedTemplates(
            templates=sum(answer.templates for answer in answers),
            loading_bytes=sum(answer.loading_bytes for answer in answers),
        )

    async def block_profiles(self) -> tuple[BlockProfile, ...]:
        """Return the measured costs of the models' blocks. If stores differ, the first store's are returned."""
        found: dict[tuple[str, str, int, int], BlockProfile] = {}
        request = pb.ListBlockProfilesRequest()
        for answer in await self._ask(lambda stub: stub.ListBlockProfiles(request, timeout=STORE_S)):
            for profile in map(profile_from, answer.profiles):
                found.setdefault((profile.model_hash, profile.dtype, profile.width, profile.height), profile)
        return tuple(found[key] for key in sorted(found))

    async def set_block_profile(self, profile: BlockProfile) -> tuple[str, ...]:
        """Replace the profile of the same model, element type and size in every store. Return the stores' names.

        A profile without blocks deletes it.

        Raises:
            InvalidRequest: The profile breaks a rule.
            StorageUnavailable: A store cannot write it.
        """
        request = pb.SetBlockProfileRequest(profile=profile_to_wire(profile))
        stores = await self._stores()
        answered(await STORES.call_all(stores, lambda stub: stub.SetBlockProfile(request, timeout=STORE_S)))
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
        """Make a worker measure the costs of its model's blocks; every store keeps the result.

        If a template exceeds its budget, stores keep the blocks that save the most time per byte, according to this
        profile. Without a store the profile is measured and returned, but not kept.

        Args:
            model: Name of the model; None for the only one that is served.
            worker: Name of the worker that measures; None for an idle one.
            width: Width of the picture in pixels; 0 for the model's own.
            height: Height of the picture in pixels; 0 for the model's own.
            timeout_s: Seconds that the measurement may take.

        Raises:
            ModelNotFound: The model is not served, or several are and none was named.
            NoWorker: No worker can measure it now.
            Unavailable: The worker's model has no blocks that can be measured.
        """
        fleet = await self.fleet()
        request = build_message(pb.ProfileBlocksRequest(), width=width, height=height)
        chosen = _choose_worker(fleet, model, worker)
        async with WORKERS.open(chosen) as stub:
            answer = await stub.ProfileBlocks(request, timeout=timeout_s)
        profile = profile_from(answer.profile)
        if not profile.blocks:
            raise Unavailable(f"worker {chosen.name} can measure no blocks of its model")
        name = next((served.name for served in chosen.models if served.model_hash == profile.model_hash), "")
        measured = MeasuredBlocks(profile=profile, worker=chosen.name, model=name or profile.model_hash)
        if not fleet.of_kind(kinds.ACTIVATIONS):
            return measured
        return replace(measured, stores=await self.set_block_profile(profile))

    async def _ask(self, call: Callable[[ActivationServiceAsyncStub], Awaitable[AnswerT]]) -> Sequence[AnswerT]:
        """Return the responses of every store. Raise the first error after all have been asked."""
        return answered(await STORES.call_all(await self._stores(), call))

    async def _stores(self) -> Sequence[FleetMember]:
        return STORES.joined(await self.fleet())


class EditMethods(GatewayClient):
    """The methods of Client about templates of edits."""

    templates = blocking(AsyncEditMethods.templates)
    drop_templates = blocking(AsyncEditMethods.drop_templates)
    pin_templates = blocking(AsyncEditMethods.pin_templates)
    warm_templates = blocking(AsyncEditMethods.warm_templates)
    block_profiles = blocking(AsyncEditMethods.block_profiles)
    set_block_profile = blocking(AsyncEditMethods.set_block_profile)
    profile_blocks = blocking(AsyncEditMethods.profile_blocks)


def _choose_worker(fleet: FleetStatus, model: str | None, worker: str | None) -> FleetMember:
    """Return the worker that measures. Raise NoWorker if all are busy, because drawing distorts the result."""
    workers = ready_workers(fleet)
    served = sorted({served.name for one in workers for served in one.models})
    if not workers:
        raise NoWorker("no worker has joined")
    if model is not None and model not in served:
        raise ModelNotFound(f"no such model: {model}", metadata={"served": ", ".join(served)})
    if model is None and worker is None and len(served) > 1:
        raise ModelNotFound(f"several models are served, name one: {', '.join(served)}")
    named = [one for one in workers if worker in (None, one.name) and _serves(one, model)]
    if not named:
        reason = f"no worker {worker} has joined" if model is None else f"worker {worker} does not serve {model}"
        raise NoWorker(reason)
    idle = [one for one in named if not one.load.running and not one.load.draining]
    if not idle and worker is None:
        busy = "every worker" if len(named) > 1 else f"worker {named[0].name}"
        raise NoWorker(
            f"{busy} draws now, which would distort the measurement", metadata={"service": kinds.ACTIVATIONS}
        )
    return (idle or named)[0]


def _serves(worker: FleetMember, model: str | None) -> bool:
    return model is None or any(served.name == model for served in worker.models)


ADD_ON = ClientAddOn(
    kind=kinds.ACTIVATIONS, title="activation store", hosted_title="templates of edits", check_fleet=check_templates
)
