"""What a store counts, and its figures of a moment."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from bottega.cache.predictor.predictor import PredictorStatistics
from bottega.v1 import cache_pb2
from bottega.v1.cache_pb2 import CacheOutcome


class Dropped(StrEnum):
    """Why a recording was not kept."""

    BUSY = "busy"
    """More waits to be written than may."""
    TROUBLE = "trouble"
    """The disk is full, or fails."""
    TOO_LARGE = "too_large"
    """Its latents are more than the whole budget."""
    UNFIT = "unfit"
    """Its embedding has another width than those of its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatistics:
    """What there is of a model. keys: entries of different ones never serve the same request."""

    model_hash: str
    entries: int
    latents: int
    keys: int
    has_profile: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentStatistics:
    """A store at one moment; see GetCacheStatsResponse.

    recorded: entries since the start. damaged: latents that were found to be, and deleted. waiting, waiting_bytes:
    recordings that are to be written.
    """

    models: tuple[ModelStatistics, ...]
    bytes: int
    budget_bytes: int
    lookups: dict[str, int]
    steps_skipped: int
    recorded: int
    evictions: int
    holes: int
    damaged: int
    dropped: dict[str, int]
    trouble: str
    predictor: PredictorStatistics | None
    waiting: int
    waiting_bytes: int


class Counts:
    """Since the start. Any thread counts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._lookups: Counter[str] = Counter({_name(outcome): 0 for outcome in CacheOutcome.values() if outcome})
        self._dropped: Counter[str] = Counter({reason.value: 0 for reason in Dropped})

    def add(self, name: str, number: int = 1) -> None:
        """Of one of the totals of LatentStatistics."""
        with self._lock:
            self._totals[name] += number

    def total(self, name: str) -> int:
        """Of `add`."""
        return self._totals[name]

    def lookup(self, outcome: CacheOutcome.ValueType) -> None:
        """A question was answered."""
        with self._lock:
            self._lookups[_name(outcome)] += 1

    def drop(self, reason: Dropped, number: int = 1) -> None:
        """Recordings were dropped."""
        with self._lock:
            self._dropped[reason.value] += number

    def lookups(self) -> dict[str, int]:
        """Questions by outcome."""
        with self._lock:
            return dict(self._lookups)

    def dropped(self) -> dict[str, int]:
        """Recordings by reason."""
        with self._lock:
            return dict(self._dropped)


def _name(outcome: CacheOutcome.ValueType) -> str:
    return cache_pb2.CacheOutcome.Name(outcome).removeprefix("CACHE_OUTCOME_").lower()
