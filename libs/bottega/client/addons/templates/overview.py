"""Which templates of edits a fleet has: calls to activation stores and workers, their answers merged, and a check-up.

A template is a recorded image. A worker that took a template from a store uses the store's ID for it, so one template
is one entry, wherever it is.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.types.checks import CheckResult, ok, warn
from bottega.errors import BottegaError, NoActivationStore, NoWorker
from bottega.v1 import activations_pb2 as pb
from bottega.v1.activations_pb2 import ListStoredTemplatesRequest, ListTemplatesRequest, Template
from bottega.v1.activations_pb2_grpc import ActivationServiceStub
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration
from bottega.v1.image_pb2 import Model
from bottega.v1.worker_pb2_grpc import WorkerServiceStub

if TYPE_CHECKING:
    from bottega.v1.activations_pb2_grpc import ActivationServiceAsyncStub
    from bottega.v1.worker_pb2_grpc import WorkerServiceAsyncStub


# Records are worked off one after the other; deleting the files of many templates takes a while.
STORE_S = 40.0
MOST_LISTED = 1000
"""Templates that a store lists at once."""

STORES: ServiceCalls[ActivationServiceAsyncStub] = ServiceCalls(
    kind=kinds.ACTIVATIONS, title="activation store", stub=ActivationServiceStub, unavailable=NoActivationStore
)


def stores_of(fleet: ListMembersResponse) -> Sequence[Registration]:
    """In the gateway's order; none where none has joined."""
    return [member.registration for member in fleet.members if member.registration.kind == kinds.ACTIVATIONS]


# The engine process answers between two of its turns.
WORKER_S = 20.0
WORKERS: ServiceCalls[WorkerServiceAsyncStub] = ServiceCalls(
    kind=kinds.WORKER, title="worker", stub=WorkerServiceStub, unavailable=NoWorker
)


def workers_of(fleet: ListMembersResponse) -> Sequence[Registration]:
    """Return the workers that are ready, in the gateway's order; those whose engines start have no templates."""
    found = (member.registration for member in fleet.members if member.registration.kind == kinds.WORKER)
    return [registration for registration in found if registration.models]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateHolder:
    """A service that has templates, and the room for them.

    kind: activations or worker. templates: how many it has. disk_bytes, memory_bytes: that they take, and the budgets
    of both; a worker has none on a disk. template_budget_bytes: that one of them may take, of a worker all of its
    memory for them; 0 is without bound. trouble: why it can record nothing now; empty when all is well.
    """

    name: str
    kind: str
    templates: int
    memory_bytes: int
    memory_budget_bytes: int
    disk_bytes: int = 0
    disk_budget_bytes: int = 0
    template_budget_bytes: int = 0
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetTemplate:
    """A template, and where it is.

    record: as its store describes it, else the worker that has used it last; whether it is in use, is recorded and
    when it was used last counts everywhere. store: that has it; empty where none does. workers: that have it, or some
    of it, in their own memory.
    """

    record: Template
    store: str
    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentService:
    """One that did not say what it has, and why."""

    name: str
    kind: str
    error: BottegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOverview:
    """All of it. templates: the one used last first. silent: what these have is not among them."""

    templates: tuple[FleetTemplate, ...]
    holders: tuple[TemplateHolder, ...]
    silent: tuple[SilentService, ...]

    @property
    def has_store(self) -> bool:
        """Whether a store has joined, answering or not."""
        return kinds.ACTIVATIONS in {*(each.kind for each in self.holders), *(each.kind for each in self.silent)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    holder: TemplateHolder
    templates: Sequence[Template]


async def look_over(fleet: ListMembersResponse) -> TemplateOverview:
    """Asks every store and every worker at once. Raises what the first one said where none of them answers."""
    asked = [(store, _ask_store) for store in stores_of(fleet)] + [(each, _ask_worker) for each in workers_of(fleet)]
    if not asked:
        raise NoWorker("no worker has joined, and no activation store")
    answers = await asyncio.gather(*(_answer(service, ask) for service, ask in asked))
    listings = [answer for answer in answers if isinstance(answer, _Listing)]
    silent = tuple(answer for answer in answers if isinstance(answer, SilentService))
    if not listings:
        raise silent[0].error
    return TemplateOverview(
        templates=_merged(listings), holders=tuple(listing.holder for listing in listings), silent=silent
    )


async def _answer(
    service: Registration, ask: Callable[[Registration], Awaitable[_Listing]]
) -> _Listing | SilentService:
    try:
        return await ask(service)
    except BottegaError as error:
        return SilentService(name=service.name, kind=service.kind, error=error)


async def _ask_store(store: Registration) -> _Listing:
    async with STORES.open(store) as stub:
        answer = await stub.ListStoredTemplates(ListStoredTemplatesRequest(limit=MOST_LISTED), timeout=STORE_S)
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
    )
    return _Listing(holder=holder, templates=answer.templates)


async def _ask_worker(worker: Registration) -> _Listing:
    async with WORKERS.open(worker) as stub:
        answer = await stub.ListTemplates(ListTemplatesRequest(), timeout=WORKER_S)
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
    """One entry for each template. Stores come first, so that the first record of one is its store's."""
    records: defaultdict[str, list[tuple[TemplateHolder, Template]]] = defaultdict(list)
    for listing in listings:
        for template in listing.templates:
            records[template.id].append((listing.holder, template))
    found = map(_known, records.values())
    return tuple(sorted(found, key=lambda known: known.record.idle_s))


def _known(records: Sequence[tuple[TemplateHolder, Template]]) -> FleetTemplate:
    stores = [(holder, record) for holder, record in records if holder.kind == kinds.ACTIVATIONS]
    _, nearest = min(stores or records, key=lambda item: item[1].idle_s)
    record = Template()
    record.CopyFrom(nearest)
    record.idle_s = min(each.idle_s for _, each in records)
    record.in_use = any(each.in_use for _, each in records)
    record.recording = any(each.recording for _, each in records)
    return FleetTemplate(
        record=record,
        store=stores[0][0].name if stores else "",
        workers=tuple(holder.name for holder, _ in records if holder.kind == kinds.WORKER),
    )


_ANSWER_S = 5.0
# Recorded of a pixel in a step: a template of SDXL at 1024, 50 steps, both halves of guidance, is about 21 GB. What is
# served has that shape, or a smaller one.
_MOST_BYTES_OF_A_PIXEL = 21e9 / 1024**2 / 50
# Of a store's disk; above it little is left for what nobody has pinned.
_MOST_PINNED = 0.8
_MORE = "bottega logs says more."
_BUDGET = "activations_mib, of the engine in its configuration, says how much memory recordings may take."


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoreFindings:
    listing: pb.ListStoredTemplatesResponse
    profiled: Set[str]


def check_templates(fleet: ListMembersResponse) -> Iterator[CheckResult]:
    """Asks every store and every worker. Not in an event loop."""
    served = {model.model_hash: model for worker in workers_of(fleet) for model in worker.models}
    stores = stores_of(fleet)
    answers = [(worker, _worker_answer(worker)) for worker in workers_of(fleet)]
    told = [answer for _, answer in answers if not isinstance(answer, BottegaError)]
    least_bytes = min((answer.budget_bytes for answer in told if answer.budget_bytes), default=0)
    for store in stores:
        yield from _check_store(store, served, least_bytes)
    if not stores and any(kinds.ACTIVATIONS in worker.uses for worker in workers_of(fleet)):
        yield warn(
            "no activation store has joined, so what workers record of edits goes with them",
            "bottega up starts one, on a server systemctl start bottega-activations; its log says why it has not.",
        )
    yield from _check_workers(answers)


def _check_store(store: Registration, served: Mapping[str, Model], workers_bytes: int) -> Iterator[CheckResult]:
    """workers_bytes: that the recordings of a worker have room for, of the one that has least; 0 where none says so."""
    try:
        found = asyncio.run(_ask_store_for_checkup(store))
    except BottegaError as error:
        yield warn(
            f"the activation store {store.name} cannot be asked: {error.message}",
            "bottega logs activations says more; edits are drawn meanwhile, and compute what workers do not have.",
        )
        return
    listing = found.listing
    if listing.trouble:
        yield warn(
            f"the activation store {store.name} records nothing: {listing.trouble}",
            "It goes on by itself when that is over; edits are drawn meanwhile.",
        )
    else:
        room = f"{_gib(listing.used_bytes)} of {_gib(listing.budget_bytes)} GiB"
        count = f"{listing.total} template{'' if listing.total == 1 else 's'}"
        yield ok(f"activation store {store.name} joined, with {count}, {room}")
    yield from _check_pins(store, listing)
    budget_bytes = min((each for each in (listing.template_budget_bytes, workers_bytes) if each), default=0)
    for model in sorted(served.values(), key=lambda each: each.name):
        if model.model_hash not in found.profiled and _may_exceed(budget_bytes, model):
            yield warn(
                f"the activation store {store.name} has no profile of {model.name}: which blocks of its templates are "
                "kept, where all of them are too much, is estimated",
                f"bottega templates profile --model {model.name} measures which are worth their bytes.",
            )


def _may_exceed(budget_bytes: int, model: Model) -> bool:
    """Whether a template of the model may be too large for what one may take, so that a profile counts."""
    pixels = model.default_width * model.default_height
    return 0 < budget_bytes < _MOST_BYTES_OF_A_PIXEL * pixels * model.default_steps


def _check_pins(store: Registration, listing: pb.ListStoredTemplatesResponse) -> Iterator[CheckResult]:
    pinned = sum(template.size_bytes for template in listing.templates if template.pinned)
    if pinned > _MOST_PINNED * listing.budget_bytes:
        share = f"{pinned / max(1, listing.budget_bytes):.0%}"
        yield warn(
            f"pinned templates take {share} of the disk that the activation store {store.name} may use",
            "bottega templates unpin ID lets one go; or give it a larger disk_bytes.",
        )


def _check_workers(
    answers: Sequence[tuple[Registration, pb.ListTemplatesResponse | BottegaError]],
) -> Iterator[CheckResult]:
    for worker, answer in answers:
        if isinstance(answer, BottegaError):
            yield warn(f"{worker.name} does not say what it has recorded of edits: {answer.message}", _MORE)
        elif not answer.budget_bytes:
            yield warn(f"{worker.name} records nothing of edits, so all of them compute the whole picture", _BUDGET)
        elif answer.templates:
            count = len(answer.templates)
            yield ok(f"{worker.name} has recorded {count} template{'' if count == 1 else 's'} of edits")


def _worker_answer(worker: Registration) -> pb.ListTemplatesResponse | BottegaError:
    try:
        return asyncio.run(_ask_worker_for_checkup(worker))
    except BottegaError as error:
        return error


async def _ask_store_for_checkup(store: Registration) -> _StoreFindings:
    async with STORES.open(store) as stub:
        request = pb.ListStoredTemplatesRequest(limit=MOST_LISTED)
        listing = await stub.ListStoredTemplates(request, timeout=_ANSWER_S)
        answer = await stub.ListBlockProfiles(pb.ListBlockProfilesRequest(), timeout=_ANSWER_S)
    return _StoreFindings(listing=listing, profiled={profile.model_hash for profile in answer.profiles})


async def _ask_worker_for_checkup(worker: Registration) -> pb.ListTemplatesResponse:
    async with WORKERS.open(worker) as stub:
        return await stub.ListTemplates(pb.ListTemplatesRequest(), timeout=_ANSWER_S)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g}"
