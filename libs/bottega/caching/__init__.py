"""Caches within a byte budget: files in memory over disk, values that a thread loads, and orders of eviction.

TieredCache keeps files in sealed memory over the disk. LoadCache loads values for callers that lease them. LruCache and
Popularity decide which entry is evicted first.
"""

from bottega.caching.load_cache import Lease, LoadCache, Loader
from bottega.caching.load_plan import CacheItem, EvictionOrder, LoadClaim, LoadCommand, LoadCounts, LoadPlan, Popularity
from bottega.caching.lru_cache import LruCache, LruEntry
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import CacheLease, FilesByPath, KnownFile, Tier, TierFiles, TierStatistics

__all__ = [
    "CacheItem",
    "CacheLease",
    "EvictionOrder",
    "FilesByPath",
    "KnownFile",
    "Lease",
    "LoadCache",
    "LoadClaim",
    "LoadCommand",
    "LoadCounts",
    "LoadPlan",
    "Loader",
    "LruCache",
    "LruEntry",
    "Popularity",
    "Tier",
    "TierFiles",
    "TierStatistics",
    "TieredCache",
]
