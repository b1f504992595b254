"""What the doctor says of approximate caches: whether they can record, and for which models nothing is reused."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Set
from dataclasses import dataclass

from bottega import kinds
from bottega.client.addons.cache.prompt_pairs import EMBEDDED_MODEL
from bottega.client.addons.cache.stores import CACHES
from bottega.client.types.checks import CheckResult, ok, warn
from bottega.errors import BottegaError
from bottega.v1 import cache_pb2
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration

_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    entries: int
    trouble: str
    profiled: Set[str]


def check_caches(fleet: ListMembersResponse) -> Iterator[CheckResult]:
    """Asks every cache. Not in an event loop."""
    served = {
        model.model_hash: model.name
        for member in fleet.members
        if member.registration.kind == kinds.WORKER
        for model in member.registration.models
    }
    for member in fleet.members:
        if member.registration.kind == kinds.CACHE:
            yield from _check_cache(member.registration, served)


def _check_cache(cache: Registration, served: dict[str, str]) -> Iterator[CheckResult]:
    try:
        findings = asyncio.run(_ask(cache))
    except BottegaError as error:
        yield warn(f"the approximate cache {cache.name} cannot be asked: {error.message}", "bottega logs says more.")
        return
    if findings.trouble:
        yield warn(
            f"the approximate cache {cache.name} records nothing: {findings.trouble}",
            "It goes on by itself when that is over; pictures are drawn meanwhile.",
        )
    else:
        yield ok(f"approximate cache {cache.name} joined, with {findings.entries} entries")
    for model_hash, name in sorted(served.items(), key=lambda item: item[1]):
        if model_hash not in findings.profiled:
            yield warn(
                f"the approximate cache {cache.name} has no profile of {name}, so nothing is reused for it (where its "
                "embeddings are 768 wide, Nirvana's own thresholds count)",
                _how_to_measure(name),
            )


def _how_to_measure(model: str) -> str:
    """The whole command: only the embedded model has prompts and a judge of its own."""
    if model == EMBEDDED_MODEL:
        return f"bottega cache profile --model {model} measures which similarity is enough."
    return (
        f"bottega cache profile --model {model} --prompts FILE --clip FOLDER measures which similarity is enough: FILE "
        "has prompts as people send them, one a line, FOLDER a CLIP of transformers."
    )


async def _ask(cache: Registration) -> _Findings:
    async with CACHES.open(cache) as stub:
        stats = await stub.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=_ANSWER_S)
        answer = await stub.ListCacheProfiles(cache_pb2.ListCacheProfilesRequest(), timeout=_ANSWER_S)
    return _Findings(
        entries=sum(model.entries for model in stats.models),
        trouble=stats.trouble,
        profiled={profile.model_hash for profile in answer.profiles},
    )
