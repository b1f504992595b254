"""Which templates a fleet has, and where: what activation stores and workers say of theirs, put together.

A worker that has a template of a store calls it as the store does, so one template is one entry, wherever it is.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from bottega import kinds
from bottega.client.addons.templates.stores import CALL_S as STORE_S
from bottega.client.addons.templates.stores import MOST_LISTED, STORES, stores_of
from bottega.client.addons.templates.workers import CALL_S as WORKER_S
from bottega.client.addons.templates.workers import WORKERS, workers_of
from bottega.errors import BottegaError, NoWorker
from bottega.v1.activations_pb2 import ListStoredTemplatesRequest, ListTemplatesRequest, Template
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration


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
