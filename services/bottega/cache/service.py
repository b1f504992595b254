"""The gRPC service of an approximate cache: it converts between messages and the store's types."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np

from bottega import rules
from bottega.addons.cache.starts import ENTRY_PATTERN
from bottega.cache.profiles import check_profile
from bottega.cache.store.settings import LatentStatistics
from bottega.cache.store.store import LatentStore
from bottega.codec import Pixels, images
from bottega.errors import CacheEntryNotFound, Violation
from bottega.v1 import cache_pb2 as pb
from bottega.v1 import cache_pb2_grpc
from bottega.v1.generation_pb2 import IMAGE_FORMAT_PNG

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["CacheService"].full_name

# Default and upper bound of a list's length, as in cache.proto.
_DEFAULT_LIMIT = 100
_MAX_LIMIT = 500
_HASH = re.compile(r"[0-9a-f]{1,128}")
_Context = grpc.aio.ServicerContext[Any, Any]


class CacheService(cache_pb2_grpc.CacheServiceServicer):
    """The servicer of bottega.v1.CacheService."""

    def __init__(self, store: LatentStore) -> None:
        self._store = store

    async def GetCacheStats(self, _request: pb.GetCacheStatsRequest, _context: _Context) -> pb.GetCacheStatsResponse:
        """Return the current statistics."""
        return _stats(await asyncio.to_thread(self._store.statistics))

    async def GetCacheEntry(self, request: pb.GetCacheEntryRequest, _context: _Context) -> pb.GetCacheEntryResponse:
        """Return an entry with its picture."""
        entry = request.entry.partition("@")[0]
        rules.refuse(list(_check_entry(entry)))
        return await asyncio.to_thread(self._entry, entry)

    async def ListCacheEntries(
        self, request: pb.ListCacheEntriesRequest, _context: _Context
    ) -> pb.ListCacheEntriesResponse:
        """Return the newest entries."""
        rules.refuse([*_check_model_hash(request.model_hash), *_check_limit(request.limit)])
        limit = request.limit or _DEFAULT_LIMIT
        return pb.ListCacheEntriesResponse(
            entries=await asyncio.to_thread(self._store.entries, request.model_hash, limit)
        )

    async def ClearCache(self, request: pb.ClearCacheRequest, _context: _Context) -> pb.ClearCacheResponse:
        """Delete the entries of a model, or all entries."""
        rules.refuse(list(_check_model_hash(request.model_hash)))
        return pb.ClearCacheResponse(entries=await asyncio.to_thread(self._store.clear, request.model_hash))

    async def ListCacheProfiles(
        self, _request: pb.ListCacheProfilesRequest, _context: _Context
    ) -> pb.ListCacheProfilesResponse:
        """Return the profiles of all models."""
        return pb.ListCacheProfilesResponse(profiles=await asyncio.to_thread(self._store.profiles))

    async def SetCacheProfile(
        self, request: pb.SetCacheProfileRequest, _context: _Context
    ) -> pb.SetCacheProfileResponse:
        """Replace the profile of a model."""
        rules.refuse(list(check_profile(request.profile)))
        return pb.SetCacheProfileResponse(profile=await asyncio.to_thread(self._store.set_profile, request.profile))

    def _entry(self, entry: str) -> pb.GetCacheEntryResponse:
        details = self._store.entry(entry)
        if details is None:
            raise CacheEntryNotFound(f"the cache has no entry {entry}", metadata={"entry": entry})
        picture = b"" if details.picture is None else _png(details.picture)
        return pb.GetCacheEntryResponse(entry=details.entry, picture=picture)


def _png(picture: np.ndarray) -> bytes:
    """Encode a picture as PNG: uint8 [height, width, 3], at most 256 pixels a side."""
    height, width, _ = picture.shape
    return images.encode(Pixels(width=width, height=height, data=picture.tobytes()), IMAGE_FORMAT_PNG, 0, {})


def _stats(figures: LatentStatistics) -> pb.GetCacheStatsResponse:
    return pb.GetCacheStatsResponse(
        models=figures.models,
        bytes=figures.bytes,
        budget_bytes=figures.budget_bytes,
        lookups=figures.lookups,
        steps_skipped=figures.steps_skipped,
        evictions=figures.evictions,
        holes=figures.holes,
        dropped=figures.dropped,
        trouble=figures.trouble,
        predictor_on=figures.predictor is not None and figures.predictor.on,
        elsewhere=figures.elsewhere,
    )


def _check_entry(entry: str) -> Iterator[Violation]:
    if ENTRY_PATTERN.fullmatch(entry) is None:
        yield Violation(field="entry", description="must be 32 hex digits, with @ and a step behind them or without")


def _check_model_hash(model_hash: str) -> Iterator[Violation]:
    """Yield the violations of a model hash; "" means all models."""
    if model_hash and _HASH.fullmatch(model_hash) is None:
        yield Violation(field="model_hash", description="must be 1 to 128 hex digits, or empty for all models")


def _check_limit(limit: int) -> Iterator[Violation]:
    if not 0 <= limit <= _MAX_LIMIT:
        yield Violation(field="limit", description=f"must be from 0 to {_MAX_LIMIT}")
