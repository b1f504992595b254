"""The SDK's methods about approximate caches, and findings about them for `bottega doctor`.

Several caches of a fleet share the entries. Every call goes to all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.addons.cache.client.profiling import CacheMeasurement, MeasuredCache, PairDrawer, measure_cache
from bottega.addons.cache.client.types import (
    CachedEntry,
    CacheProfile,
    CacheStats,
    entry_from,
    profile_from,
    profile_to_wire,
    silent_stats,
    stats_from,
)
from bottega.client.addons.addon import CheckResult, ClientAddOn, ServiceCalls, answered, ok, present, warn
from bottega.client.sdk.aio import AsyncGatewayClient
from bottega.client.sdk.sync import GatewayClient, blocking
from bottega.client.types.fleet import FleetMember, FleetStatus
from bottega.client.types.messages import build_message
from bottega.errors import BottegaError, CacheEntryNotFound, NoCache
from bottega.miniature import MODELS
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2_grpc import CacheServiceStub

if TYPE_CHECKING:
    from bottega.v1.cache_pb2_grpc import CacheServiceAsyncStub

# A cache writes its records one after the other, and itself gives up after 30 s.
_CALL_S = 40.0
_CHECK_S = 5.0
_CACHES: ServiceCalls[CacheServiceAsyncStub] = ServiceCalls(
    kind=kinds.CACHE, title="approximate cache", stub=CacheServiceStub, unavailable=NoCache
)


class AsyncCacheMethods(AsyncGatewayClient):
    """The methods of AsyncClient about approximate caches.

    Every method raises NoCache if no cache has joined, or if none answers. Methods that change something ask every
    cache, and raise the error of one that fails after the others have done it. Methods that list something leave out
    a cache that does not answer; `cache_stats` names it.
    """

    async def cache_stats(self) -> tuple[CacheStats, ...]:
        """Return the contents and statistics of every cache. One that does not answer has a `failure`."""
        request = cache_pb2.GetCacheStatsRequest()
        caches = await self._caches()
        answers = await _CACHES.call_all(caches, lambda stub: stub.GetCacheStats(request, timeout=_CALL_S))
        present(answers)
        return tuple(
            silent_stats(cache.name, answer.message)
            if isinstance(answer, BottegaError)
            else stats_from(answer, cache.name)
            for cache, answer in zip(caches, answers, strict=True)
        )

    async def cache_entry(self, entry: str) -> CachedEntry:
        """Return one entry with its picture. Raise CacheEntryNotFound if no cache has it.

        Args:
            entry: ID of the entry, or of a latent of it: "ENTRY@STEP", as in a provenance.
        """
        request = build_message(cache_pb2.GetCacheEntryRequest(), entry=entry)
        missing = CacheEntryNotFound(f"no cache has the entry {entry}", metadata={"entry": entry})
        caches = await self._caches()
        _, answer = await _CACHES.call_owner(
            caches, lambda stub: stub.GetCacheEntry(request, timeout=_CALL_S), missing=missing
        )
        return entry_from(answer.entry, picture=answer.picture)

    async def cache_entries(self, model_hash: str = "", *, limit: int = 100) -> tuple[CachedEntry, ...]:
        """Return the newest entries, without pictures.

        Args:
            model_hash: Hash of the model whose entries are returned; empty for all models.
            limit: Number of entries, 1 to 500.
        """
        request = build_message(cache_pb2.ListCacheEntriesRequest(), model_hash=model_hash, limit=limit)
        caches = await self._caches()
        answers = await _CACHES.call_all(caches, lambda stub: stub.ListCacheEntries(request, timeout=_CALL_S))
        found = [entry for answer in present(answers) for entry in answer.entries]
        newest = sorted(found, key=lambda entry: entry.recorded_s, reverse=True)
        return tuple(map(entry_from, newest[:limit]))

    async def clear_cache(self, model_hash: str = "") -> int:
        """Delete all entries, or those of one model, in every cache, and return how many there were."""
        request = build_message(cache_pb2.ClearCacheRequest(), model_hash=model_hash)
        caches = await self._caches()
        answers = answered(await _CACHES.call_all(caches, lambda stub: stub.ClearCache(request, timeout=_CALL_S)))
        return sum(answer.entries for answer in answers)

    async def cache_profiles(self) -> tuple[CacheProfile, ...]:
        """Return the profile of each model that has one. If caches differ, the first one's is returned."""
        request = cache_pb2.ListCacheProfilesRequest()
        caches = await self._caches()
        answers = await _CACHES.call_all(caches, lambda stub: stub.ListCacheProfiles(request, timeout=_CALL_S))
        found: dict[str, CacheProfile] = {}
        for answer in present(answers):
            for profile in answer.profiles:
                found.setdefault(profile.model_hash, profile_from(profile))
        return tuple(found[model] for model in sorted(found))

    async def set_cache_profile(self, profile: CacheProfile) -> CacheProfile:
        """Replace the profile of a model in every cache, and return it as the caches store it.

        A profile without classes deletes that of its model.

        Raises:
            InvalidRequest: The profile breaks a rule.
            StorageUnavailable: A cache cannot write it.
        """
        request = cache_pb2.SetCacheProfileRequest(profile=profile_to_wire(profile))
        caches = await self._caches()
        answers = await _CACHES.call_all(caches, lambda stub: stub.SetCacheProfile(request, timeout=_CALL_S))
        return profile_from(answered(answers)[0].profile)

    async def share_cache_profiles(self) -> int:
        """Give each cache the profiles that only others have, such as one that has just joined. Return how many."""
        caches = await self._caches()
        requests = {
            profile.model_hash: cache_pb2.SetCacheProfileRequest(profile=profile_to_wire(profile))
            for profile in await self.cache_profiles()
        }

        async def complete(stub: CacheServiceAsyncStub) -> int:
            listed = await stub.ListCacheProfiles(cache_pb2.ListCacheProfilesRequest(), timeout=_CALL_S)
            missing = requests.keys() - {profile.model_hash for profile in listed.profiles}
            for model_hash in missing:
                await stub.SetCacheProfile(requests[model_hash], timeout=_CALL_S)
            return len(missing)

        return sum(answered(await _CACHES.call_all(caches, complete)))

    async def profile_cache(
        self, wanted: CacheMeasurement, *, on_pair: Callable[[int, int], None] = lambda done, pairs: None
    ) -> MeasuredCache:
        """Measure from which similarity a cached latent is good enough, and set that as the model's profile.

        Both prompts of each pair are drawn through the running suite, and the second one also from the latents of the
        first.

        Args:
            wanted: The measurement.
            on_pair: Called with the number of pairs that are done, and the number of all.

        Raises:
            InvalidRequest: The measurement breaks a rule, or a prompt cannot be scored.
            Unavailable: The cache records nothing.
            BottegaError: Drawing failed.
        """
        wanted.check()
        steps, model = wanted.num_inference_steps, wanted.model
        drawer = PairDrawer(self, self._newest_entries, num_inference_steps=steps, model=model)
        # Imported here: it imports what starts processes, which would slow every command down.
        from bottega.quality.scoring import scorer

        async with scorer(wanted.clip) as scores:
            measured = await measure_cache(drawer, scores, wanted, on_pair=on_pair)
        return replace(measured, profile=await self.set_cache_profile(measured.profile))

    async def _newest_entries(self, model_hash: str, limit: int) -> Sequence[CachedEntry]:
        return await self.cache_entries(model_hash, limit=limit)

    async def _caches(self) -> Sequence[FleetMember]:
        return _CACHES.joined(await self.fleet())


class CacheMethods(GatewayClient):
    """The methods of Client about approximate caches."""

    cache_stats = blocking(AsyncCacheMethods.cache_stats)
    cache_entry = blocking(AsyncCacheMethods.cache_entry)
    cache_entries = blocking(AsyncCacheMethods.cache_entries)
    clear_cache = blocking(AsyncCacheMethods.clear_cache)
    cache_profiles = blocking(AsyncCacheMethods.cache_profiles)
    set_cache_profile = blocking(AsyncCacheMethods.set_cache_profile)
    share_cache_profiles = blocking(AsyncCacheMethods.share_cache_profiles)
    profile_cache = blocking(AsyncCacheMethods.profile_cache)


def check_caches(fleet: FleetStatus) -> Iterator[CheckResult]:
    """Yield whether caches can record, and which models lack a profile. Blocks: do not call it in an event loop."""
    served = {model.model_hash: model.name for worker in fleet.of_kind(kinds.WORKER) for model in worker.models}
    answers: list[tuple[FleetMember, CacheStats, frozenset[str]]] = []
    for cache in fleet.of_kind(kinds.CACHE):
        try:
            answers.append((cache, *asyncio.run(_ask(cache))))
        except BottegaError as error:
            text = f"the approximate cache {cache.name} does not answer: {error.message}"
            yield warn(text, "See bottega logs cache.")
    measured = frozenset[str]().union(*(profiled for _, _, profiled in answers))
    for cache, stats, profiled in answers:
        yield from _check_cache(cache, served, stats, profiled=profiled, measured=measured)


def _check_cache(
    cache: FleetMember,
    served: dict[str, str],
    stats: CacheStats,
    *,
    profiled: frozenset[str],
    measured: frozenset[str],
) -> Iterator[CheckResult]:
    """Yield the findings about a cache.

    Args:
        served: Names of the served models, by hash.
        profiled: Hashes of the models of which this cache has a profile.
        measured: The same, of any cache.
    """
    if stats.trouble:
        yield warn(
            f"the approximate cache {cache.name} records nothing: {stats.trouble}",
            "It resumes by itself when the problem is solved. Drawing goes on without the cache.",
        )
    else:
        entries = sum(model.entries for model in stats.models)
        yield ok(f"approximate cache {cache.name} joined, with {entries} entr{'y' if entries == 1 else 'ies'}")
    for model_hash, name in sorted(served.items(), key=lambda item: item[1]):
        if model_hash not in profiled:
            yield warn(
                f"the approximate cache {cache.name} has no profile of {name}, so it reuses no latents (except by"
                " Nirvana's thresholds, if its embeddings are 768 wide)",
                _SHARE if model_hash in measured else _how_to_measure(name),
            )


_SHARE = "Another cache has it: bottega cache profiles --share copies it."


def _how_to_measure(model: str) -> str:
    """Return the full command that measures a model. Only embedded models have built-in prompts and a scorer."""
    if model in MODELS:
        return f"bottega cache profile --model {model} measures which similarity is enough."
    return (
        f"bottega cache profile --model {model} --prompts FILE --clip FOLDER measures which similarity is enough: FILE "
        "has one prompt a line, as people send them, and FOLDER has a CLIP model of transformers."
    )


async def _ask(cache: FleetMember) -> tuple[CacheStats, frozenset[str]]:
    """Return a cache's statistics, and the hashes of the models for which it has a profile."""
    async with _CACHES.open(cache) as stub:
        stats = await stub.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=_CHECK_S)
        answer = await stub.ListCacheProfiles(cache_pb2.ListCacheProfilesRequest(), timeout=_CHECK_S)
    return stats_from(stats, cache.name), frozenset(profile.model_hash for profile in answer.profiles)


ADD_ON = ClientAddOn(
    kind=kinds.CACHE, title="approximate cache", hosted_title="cached models", check_fleet=check_caches
)
