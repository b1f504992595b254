"""The templates of a fleet: calls to stores and workers, their merged responses, and checks of `bottega doctor`.

A template is the recorded activations of an image. A worker that loaded a template from a store uses the store's ID, so
one template is one entry, wherever its copies are.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.addons.edits.client.types import (
    FleetTemplate,
    SilentService,
    TemplateHolder,
    TemplateOverview,
    template_from,
)
from bottega.client.addons.addon import CheckResult, ServiceCalls, ok, warn
from bottega.client.types.fleet import FleetMember, FleetStatus
from bottega.client.types.models import ServedModel
from bottega.errors import BottegaError, NoActivationStore, NoWorker
from bottega.v1 import activations_pb2 as pb
from bottega.v1.activations_pb2_grpc import ActivationServiceStub, TemplateServiceStub

if TYPE_CHECKING:
    from bottega.v1.activations_pb2_grpc import ActivationServiceAsyncStub, TemplateServiceAsyncStub

STORE_S = 40.0
"""Time-out in seconds of a call to a store, which writes records one after the other and is slow to delete many
files."""
WORKER_S = 20.0
"""Time-out in seconds of a call to a worker, whose engine process answers only between two steps."""
_CHECK_S = 5.0

STORES: ServiceCalls[ActivationServiceAsyncStub] = ServiceCalls(
    kind=kinds.ACTIVATIONS, title="activation store", stub=ActivationServiceStub, unavailable=NoActivationStore
)
WORKERS: ServiceCalls[TemplateServiceAsyncStub] = ServiceCalls(
    kind=kinds.WORKER, title="worker", stub=TemplateServiceStub, unavailable=NoWorker
)

# Templates that a store lists at once.
_MOST_LISTED = 1000
# Recorded bytes of a pixel in a step: a template of SDXL at 1024x1024, 50 steps and both halves of guidance has about
# 21 GB. Served models have this shape, or a smaller one.
_MOST_BYTES_OF_A_PIXEL = 21e9 / 1024**2 / 50
# Share of a store's disk. If pinned templates take more, little is left for the others.
_MOST_PINNED = 0.8
_BUDGET = "engine.edits.activations_mib in its configuration says how much memory recordings may take."


def ready_workers(fleet: FleetStatus) -> Sequence[FleetMember]:
    """Return the workers that are ready. Others have no templates, because their engines are still starting."""
    return [worker for worker in fleet.of_kind(kinds.WORKER) if worker.models]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    holder: TemplateHolder
    templates: Sequence[pb.Template]


async def look_over(fleet: FleetStatus) -> TemplateOverview:
    """Ask all stores and workers at once for their templates. Raise the first error if none of them answers."""
    stores, workers = fleet.of_kind(kinds.ACTIVATIONS), ready_workers(fleet)
    if not stores and not workers:
        raise NoWorker("no worker and no activation store has joined")
    asked = [*(_answer(store, _ask_store) for store in stores), *(_answer(worker, _ask_worker) for worker in workers)]
    answers = await asyncio.gather(*asked)
    listings = [answer for answer in answers if isinstance(answer, _Listing)]
    silent = tuple(answer for answer in answers if isinstance(answer, SilentService))
    if not listings:
        raise silent[0].error
    return TemplateOverview(
        templates=_merged(listings), holders=tuple(listing.holder for listing in listings), silent=silent
    )


async def _answer(service: FleetMember, ask: Callable[[FleetMember], Awaitable[_Listing]]) -> _Listing | SilentService:
    try:
        return await ask(service)
    except BottegaError as error:
        return SilentService(name=service.name, kind=service.kind, error=error)


async def _ask_store(store: FleetMember, *, timeout_s: float = STORE_S) -> _Listing:
    async with STORES.open(store) as stub:
        answer = await stub.ListStoredTemplates(pb.ListStoredTemplatesRequest(limit=_MOST_LISTED), timeout=timeout_s)
    holder = TemplateHolder(
        name=store.name,
        kind=store.kind,
        templates=answer.total,
        memory_bytes=answer.memory_bytes,
        memory_budget_bytes=answer.memory_budget_bytes,
        disk_bytes=answer.used_bytes,
        disk_budget_bytes=answer.budget_bytes,
        template_budget_bytes=answer.template_budget_bytes,
        trouble=answer.trouble,
        objects_bytes=answer.objects_bytes,
        objects_budget_bytes=answer.objects_budget_bytes,
        objects_trouble=answer.objects_trouble,
    )
    return _Listing(holder=holder, templates=answer.templates)


async def _ask_worker(worker: FleetMember, *, timeout_s: float = WORKER_S) -> _Listing:
    async with WORKERS.open(worker) as stub:
        answer = await stub.ListTemplates(pb.ListTemplatesRequest(), timeout=timeout_s)
    holder = TemplateHolder(
        name=worker.name,
        kind=worker.kind,
        templates=len(answer.templates),
        memory_bytes=answer.used_bytes,
        memory_budget_bytes=answer.budget_bytes,
        template_budget_bytes=answer.budget_bytes,
    )
    return _Listing(holder=holder, templates=answer.templates)


def _merged(listings: Iterable[_Listing]) -> tuple[FleetTemplate, ...]:
    """Return one entry for each template, the most recently used first."""
    records: defaultdict[str, list[tuple[TemplateHolder, pb.Template]]] = defaultdict(list)
    for listing in listings:
        for template in listing.templates:
            records[template.id].append((listing.holder, template))
    return tuple(sorted(map(_merge_records, records.values()), key=lambda template: template.idle_s))


def _merge_records(records: Sequence[tuple[TemplateHolder, pb.Template]]) -> FleetTemplate:
    """Merge the descriptions of one template. The store's counts most, else that of the worker which used it last."""
    ordered = sorted(
        records,
        key=lambda item: (
            item[0].kind != kinds.ACTIVATIONS,
            item[1].tier == pb.TEMPLATE_TIER_OBJECTS,
            item[1].idle_s,
        ),
    )
    stores = [holder.name for holder, _ in ordered if holder.kind == kinds.ACTIVATIONS]
    return template_from(
        [record for _, record in ordered],
        store=stores[0] if stores else "",
        workers=tuple(holder.name for holder, _ in records if holder.kind == kinds.WORKER),
    )


def check_templates(fleet: FleetStatus) -> Iterator[CheckResult]:
    """Yield whether stores and workers can record edits, and have space. Blocks: do not call it in an event loop."""
    workers, stores = ready_workers(fleet), fleet.of_kind(kinds.ACTIVATIONS)
    served = {model.model_hash: model for worker in workers for model in worker.models}
    answers = [asyncio.run(_answer(worker, _check_worker)) for worker in workers]
    budgets = [answer.holder.memory_budget_bytes for answer in answers if isinstance(answer, _Listing)]
    for store in stores:
        yield from _check_store(store, served, min(filter(None, budgets), default=0))
    if not stores and any(kinds.ACTIVATIONS in worker.uses for worker in workers):
        yield warn(
            "no activation store has joined, so recordings of edits are lost when their worker ends",
            "bottega up starts one; on a server: systemctl start bottega-activations. Its log says why it is missing.",
        )
    for answer in answers:
        yield from _worker_results(answer)


def _check_store(store: FleetMember, served: Mapping[str, ServedModel], worker_bytes: int) -> Iterator[CheckResult]:
    """Yield the findings about one store.

    Args:
        worker_bytes: The smallest memory budget for recordings among workers; 0 if no worker records any.
    """
    try:
        listing, profiled = asyncio.run(_ask_store_for_check(store))
    except BottegaError as error:
        yield warn(
            f"the activation store {store.name} does not answer: {error.message}",
            "See bottega logs activations. Edits are drawn meanwhile, and compute what workers do not have.",
        )
        return
    holder = listing.holder
    if holder.trouble:
        yield warn(
            f"the activation store {store.name} records nothing: {holder.trouble}",
            "It resumes by itself when the problem is solved. Edits are drawn meanwhile.",
        )
    else:
        room = f"{_gib(holder.disk_bytes)} of {_gib(holder.disk_budget_bytes)} GiB"
        count = f"{holder.templates} template{'' if holder.templates == 1 else 's'}"
        yield ok(f"activation store {store.name} joined, with {count}, {room}")
    if holder.objects_trouble:
        yield warn(
            f"the activation store {store.name} cannot use its object storage: {holder.objects_trouble}",
            "It resumes by itself when the problem is solved. Edits are drawn meanwhile.",
        )
    pinned_bytes = sum(template.size_bytes for template in listing.templates if template.pinned)
    if pinned_bytes > _MOST_PINNED * holder.disk_budget_bytes:
        share = f"{pinned_bytes / max(1, holder.disk_budget_bytes):.0%}"
        yield warn(
            f"pinned templates take {share} of the disk that the activation store {store.name} may use",
            "Unpin some with bottega templates unpin ID, or raise its disk_bytes.",
        )
    budget_bytes = min(filter(None, (holder.template_budget_bytes, worker_bytes)), default=0)
    for model in sorted(served.values(), key=lambda model: model.name):
        if model.model_hash not in profiled and _may_exceed(budget_bytes, model):
            yield warn(
                f"the activation store {store.name} has no profile of {model.name}, so it can only estimate which"
                " blocks of a large template to keep",
                f"bottega templates profile --model {model.name} measures which blocks are worth their bytes.",
            )


def _may_exceed(budget_bytes: int, model: ServedModel) -> bool:
    """Return whether a template of the model may be larger than this budget; 0 means no limit."""
    pixels = model.default_width * model.default_height
    return 0 < budget_bytes < _MOST_BYTES_OF_A_PIXEL * pixels * model.default_steps


def _worker_results(answer: _Listing | SilentService) -> Iterator[CheckResult]:
    if isinstance(answer, SilentService):
        yield warn(f"{answer.name} does not list its recorded edits: {answer.error.message}", "See bottega logs.")
    elif not answer.holder.memory_budget_bytes:
        yield warn(f"{answer.holder.name} records no edits, so each of them computes the whole picture", _BUDGET)
    elif answer.templates:
        count = len(answer.templates)
        yield ok(f"{answer.holder.name} has recorded {count} template{'' if count == 1 else 's'} of edits")


async def _check_worker(worker: FleetMember) -> _Listing:
    return await _ask_worker(worker, timeout_s=_CHECK_S)


async def _ask_store_for_check(store: FleetMember) -> tuple[_Listing, frozenset[str]]:
    """Return a store's templates, and the hashes of the models for which it has a profile."""
    listing = await _ask_store(store, timeout_s=_CHECK_S)
    async with STORES.open(store) as stub:
        answer = await stub.ListBlockProfiles(pb.ListBlockProfilesRequest(), timeout=_CHECK_S)
    return listing, frozenset(profile.model_hash for profile in answer.profiles)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g}"
