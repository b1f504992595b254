"""What the doctor says of templates: whether stores keep them and have room, which models lack a profile, and which
workers record nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from bottega import kinds
from bottega.client.addons.templates.stores import MOST_LISTED, STORES, stores_of
from bottega.client.addons.templates.workers import WORKERS, workers_of
from bottega.client.types.checks import CheckResult, ok, warn
from bottega.errors import BottegaError
from bottega.v1 import activations_pb2 as pb
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration
from bottega.v1.image_pb2 import Model

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
    answers = [(worker, _answer(worker)) for worker in workers_of(fleet)]
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
        found = asyncio.run(_ask_store(store))
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


def _answer(worker: Registration) -> pb.ListTemplatesResponse | BottegaError:
    try:
        return asyncio.run(_ask_worker(worker))
    except BottegaError as error:
        return error


async def _ask_store(store: Registration) -> _StoreFindings:
    async with STORES.open(store) as stub:
        request = pb.ListStoredTemplatesRequest(limit=MOST_LISTED)
        listing = await stub.ListStoredTemplates(request, timeout=_ANSWER_S)
        answer = await stub.ListBlockProfiles(pb.ListBlockProfilesRequest(), timeout=_ANSWER_S)
    return _StoreFindings(listing=listing, profiled={profile.model_hash for profile in answer.profiles})


async def _ask_worker(worker: Registration) -> pb.ListTemplatesResponse:
    async with WORKERS.open(worker) as stub:
        return await stub.ListTemplates(pb.ListTemplatesRequest(), timeout=_ANSWER_S)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3g}"
