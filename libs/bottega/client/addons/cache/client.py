"""The clients' methods about approximate caches, and the doctor's findings about them.

A fleet usually has one cache. If it has several, every call goes to all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.client.addons.addon import ClientAddOn
from bottega.client.addons.cache.profiling import CacheMeasurement, MeasuredCache, PairDrawer, measure_cache
from bottega.client.addons.cache.samples import EMBEDDED_MODEL
from bottega.client.addons.service_calls import ServiceCalls
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.blocking import blocking
from bottega.client.sdk.sync import GatewayClient
from bottega.client.types.checks import CheckResult, ok, warn
from bottega.client.types.messages import build_message
from bottega.errors import BottegaError, CacheEntryNotFound, NoCache
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2 import CacheEntry, CacheProfile, GetCacheEntryResponse, GetCacheStatsResponse
from bottega.v1.cache_pb2_grpc import CacheServiceStub
from bottega.v1.fleet_pb2 import ListMembersResponse, Registration

if TYPE_CHECKING:
    from bottega.v1.cache_pb2_grpc import CacheServiceAsyncStub


# A cache works its records off one after the other, and says so itself after 30 s.
CALL_S = 40.0
CACHES: ServiceCalls[CacheServiceAsyncStub] = ServiceCalls(
    kind=kinds.CACHE, title="approximate cache", stub=CacheServiceStub, unavailable=NoCache
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """What one cache holds, and how well it serves, as the contract describes it. cache: its name in the fleet."""

    cache: str
    stats: GetCacheStatsResponse


class AsyncCacheMethods(AsyncGatewayClient):
    """What AsyncClient offers about approximate caches. Every method raises NoCache without one that answers."""

    async def cache_stats(self) -> tuple[CacheFigures, ...]:
        """Figures of every cache."""
        found = []
        for cache in await self._caches():
            async with CACHES.open(cache) as stub:
                stats = await stub.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=CALL_S)
            found.append(CacheFigures(cache=cache.name, stats=stats))
        return tuple(found)

    async def cache_entry(self, entry: str) -> GetCacheEntryResponse:
        """One entry, with its picture.

        entry: also as a provenance or a pin names a latent of it, "ENTRY@STEP". Raises CacheEntryNotFound.
        """
        request = build_message(cache_pb2.GetCacheEntryRequest(), entry=entry)
        missing = CacheEntryNotFound(f"no cache has the entry {entry}", metadata={"entry": entry})
        caches = await self._caches()
        _, answer = await CACHES.call_owner(
            caches, lambda stub: stub.GetCacheEntry(request, timeout=CALL_S), missing=missing
        )
        return answer

    async def cache_entries(self, model_hash: str = "", *, limit: int = 100) -> tuple[CacheEntry, ...]:
        """The newest entries, without pictures. model_hash: of the model that is meant; empty is any."""
        request = build_message(cache_pb2.ListCacheEntriesRequest(), model_hash=model_hash, limit=limit)
        found: list[CacheEntry] = []
        for cache in await self._caches():
            async with CACHES.open(cache) as stub:
                found += (await stub.ListCacheEntries(request, timeout=CALL_S)).entries
        newest = sorted(found, key=lambda each: each.recorded_s, reverse=True)  # stable: as they came, where equal
        return tuple(newest[:limit])

    async def clear_cache(self, model_hash: str = "") -> int:
        """Forgets entries, all or those of one model; how many."""
        request = build_message(cache_pb2.ClearCacheRequest(), model_hash=model_hash)
        number = 0
        for cache in await self._caches():
            async with CACHES.open(cache) as stub:
                number += (await stub.ClearCache(request, timeout=CALL_S)).entries
        return number

    async def cache_profiles(self) -> tuple[CacheProfile, ...]:
        """Profiles, one for each model that has one; of several caches, the first one's count."""
        found: dict[str, CacheProfile] = {}
        for cache in await self._caches():
            async with CACHES.open(cache) as stub:
                answer = await stub.ListCacheProfiles(cache_pb2.ListCacheProfilesRequest(), timeout=CALL_S)
            for profile in answer.profiles:
                found.setdefault(profile.model_hash, profile)
        return tuple(found[model] for model in sorted(found))

    async def set_cache_profile(self, profile: CacheProfile) -> CacheProfile:
        """Has every cache keep a profile instead of that of the same model; one without classes forgets it.

        Returns it as it counts from now on. Raises InvalidRequest, StorageUnavailable.
        """
        request = cache_pb2.SetCacheProfileRequest(profile=profile)
        for cache in await self._caches():
            async with CACHES.open(cache) as stub:
                kept = (await stub.SetCacheProfile(request, timeout=CALL_S)).profile
        return kept

    async def profile_cache(
        self, wanted: CacheMeasurement, *, on_pair: Callable[[int, int], None] = lambda done, pairs: None
    ) -> MeasuredCache:
        """Measures from which similarity a cached latent is good enough, and has every cache keep that as a profile.

        Draws both prompts of each pair, and the second one from the latents of the first, through the running suite.
        on_pair: told how many pairs are done, and how many there are. Raises InvalidRequest for what is wrong with what
        is wanted or cannot be scored, Unavailable where the cache records nothing, and what drawing raises.
        """
        wanted.check()
        steps, model = wanted.num_inference_steps, wanted.model
        drawer = PairDrawer(self, self._newest_entries, num_inference_steps=steps, model=model)
        # Only here: it brings what starts processes, and every command would wait for that.
        from bottega.quality.scoring import scorer

        async with scorer(wanted.clip) as scores:
            measured = await measure_cache(drawer, scores, wanted, on_pair=on_pair)
        return replace(measured, profile=await self.set_cache_profile(measured.profile))

    async def _newest_entries(self, model_hash: str, limit: int) -> Sequence[CacheEntry]:
        return await self.cache_entries(model_hash, limit=limit)

    async def _caches(self) -> Sequence[Registration]:
        return CACHES.joined(await self.fleet())


class CacheMethods(GatewayClient):
    """What Client offers about approximate caches."""

    cache_stats = blocking(AsyncCacheMethods.cache_stats)
    cache_entry = blocking(AsyncCacheMethods.cache_entry)
    cache_entries = blocking(AsyncCacheMethods.cache_entries)
    clear_cache = blocking(AsyncCacheMethods.clear_cache)
    cache_profiles = blocking(AsyncCacheMethods.cache_profiles)
    set_cache_profile = blocking(AsyncCacheMethods.set_cache_profile)
    profile_cache = blocking(AsyncCacheMethods.profile_cache)


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


ADD_ON = ClientAddOn(
    kind=kinds.CACHE, title="approximate cache", hosted_title="cached models", check_fleet=check_caches
)
