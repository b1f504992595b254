"""The counters of a store, and a snapshot of its statistics."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from bottega.blobstore import StoreCounts
from bottega.cache.predictor import PredictorStatistics
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2 import CacheModelStats, CacheOutcome


class Dropped(StrEnum):
    """The reasons for which a recording is not stored."""

    BUSY = "busy"
    """Too many recordings wait to be written."""
    TROUBLE = "trouble"
    """The disk is full or fails."""
    TOO_LARGE = "too_large"
    """Its latents exceed the whole budget."""
    UNFIT = "unfit"
    """Its embedding has another width than the others of its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentStatistics:
    """A snapshot of a store's statistics; see GetCacheStatsResponse."""

    models: tuple[CacheModelStats, ...]
    bytes: int
    budget_bytes: int
    lookups: dict[str, int]
    steps_skipped: int
    recorded: int
    """Number of entries that were recorded since the start."""
    evictions: int
    holes: int
    damaged: int
    """Number of latents that were damaged and deleted."""
    dropped: dict[str, int]
    trouble: str
    predictor: PredictorStatistics | None
    waiting: int
    """Number of recordings that wait to be written."""
    waiting_bytes: int
    """Bytes of recordings that wait to be written."""


class CacheCounts(StoreCounts[Dropped]):
    """The counters of a cache, including the number of questions by outcome."""

    def __init__(self) -> None:
        super().__init__(Dropped)
        self._lookups: Counter[str] = Counter({_name(outcome): 0 for outcome in CacheOutcome.values() if outcome})

    def lookup(self, outcome: CacheOutcome.ValueType) -> None:
        """Count an answered question."""
        with self._lock:
            self._lookups[_name(outcome)] += 1

    def lookups(self) -> dict[str, int]:
        """Return the number of questions by outcome."""
        with self._lock:
            return dict(self._lookups)


def _name(outcome: CacheOutcome.ValueType) -> str:
    return cache_pb2.CacheOutcome.Name(outcome).removeprefix("CACHE_OUTCOME_").lower()
