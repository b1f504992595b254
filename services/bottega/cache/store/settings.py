"""The settings and the statistics of a LatentStore."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bottega.blobstore.writer import StoreCounts
from bottega.cache.eviction import LCBFU, EvictionPolicy
from bottega.cache.predictor import PredictorStatistics
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2 import CacheModelStats, CacheOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings of a LatentStore."""

    folder: Path
    """Folder of database, latents and profiles. Only one process at a time may use it."""
    budget_bytes: int
    """Upper bound on the bytes of latents and of the small pictures of their entries."""
    policy: EvictionPolicy = LCBFU
    """Determines which latents are evicted first. Its clock counts questions of workers."""
    batch_share: float = 0.02
    """Share of the budget that each eviction frees in addition, so that evictions are rare."""
    max_entries: int = 200_000
    """Upper bound on the number of pictures with latents."""
    min_free_bytes: int = 0
    """Bytes of disk space that stay free for other programs. At most 5 % of the disk counts."""
    exploration: float = 0.05
    """Share of hits that are not used, so that some pictures are still drawn from noise."""
    row_pictures: int = 6
    """Number of pictures in a row of one prompt; see `PromptRows`."""
    plain_for_loras: bool = False
    """Whether a question with LoRAs may also get entries without LoRAs (those of its plain_key)."""
    doorkeeper: bool = True
    """Whether a key is recorded only from its second question on."""
    predictor: bool = True
    """Whether searches that are predicted to find nothing may be skipped."""
    max_waiting: int = 256
    """Upper bound on the number of recordings that wait to be written."""
    max_waiting_bytes: int = 256 << 20
    """Upper bound on the bytes of recordings that wait to be written."""
    retry_s: float = 5.0
    """Seconds between attempts to use a failed disk, and longest time until counts are written."""
    seed: int | None = None
    """Seed of the random choice of unused hits; None means a different one each time."""


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
    elsewhere: int
    """Number of entries that belong to other caches of the fleet."""
    sharing: int
    """Number of caches that share the entries, this one included."""


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
