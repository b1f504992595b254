"""The tiers of a TieredCache, its entries in memory, and its leases."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from bottega.v1.trace_pb2 import StoreTimes


class Tier(StrEnum):
    """The place from which a request for a file was served."""

    MEMORY = "memory"
    """The file was in memory already, for another reason than this request."""
    LOADED = "loaded"
    """The file was loaded for this request: it was being loaded, or was loaded ahead and is used for the first time."""
    DISK = "disk"
    """The file is read from disk, because memory had no room for it."""


@dataclass(slots=True, kw_only=True)
class TierStatistics:
    """Counters since the start."""

    by_tier: Counter[Tier]
    """Number of leases by the tier of their file."""
    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    """Seconds of loading."""
    failures: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheLease:
    """Bytes that stay readable until the lease is given back, even if the file is evicted or deleted.

    Read them with os.preadv.
    """

    digest: str
    descriptor: int
    size_bytes: int
    tier: Tier
    resident: bool
    """Whether they are in sealed memory."""
    times: StoreTimes
    """Store times from the request until the lease began."""
    begun_s: float = field(default_factory=time.monotonic)
    """When the lease began, on the monotonic clock."""

    def times_until_now(self) -> StoreTimes:
        """Return the store times including the wait to be sent until now."""
        times = StoreTimes(send_wait_s=time.monotonic() - self.begun_s)
        times.MergeFrom(self.times)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """Facts about a file that a caller knows, which save a look-up on the disk."""

    size_bytes: int
    group: str = ""
    """Group of files that are used together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParts:
    """The durations of a file's load."""

    began_s: float
    """Start on the monotonic clock."""
    read_s: float
    check_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class CacheEntry:
    """A file in memory, which is being loaded until `loaded` is done."""

    descriptor: int
    size_bytes: int
    loaded: Future[None] = field(default_factory=Future)
    awaits_fetch: bool
    """Whether the file was loaded for a fetch that is expected soon."""
    leases: int = 0
    """Number of open leases."""
    load: LoadParts | None = None
    """Durations of its load, if it was read from the disk."""
    group: str = ""
    """Group of files that are used together."""
    forgotten: bool = False
    """Whether the entry is evicted as soon as it is idle."""

    @property
    def is_idle(self) -> bool:
        """Whether the entry is loaded and has no lease."""
        return self.loaded.done() and not self.leases

    def lease(self, digest: str, tier: Tier, asked_s: float) -> CacheLease:
        """Return a lease that begins now, for a request at `asked_s` on the monotonic clock."""
        return CacheLease(
            digest=digest,
            descriptor=self.descriptor,
            size_bytes=self.size_bytes,
            tier=tier,
            resident=True,
            times=self._times(asked_s),
        )

    def _times(self, asked_s: float) -> StoreTimes:
        """Return the times of a lease that begins now. A load that ran before the request counts only as waiting."""
        if self.load is None or self.load.began_s < asked_s:
            return StoreTimes(wait_s=time.monotonic() - asked_s)
        return StoreTimes(wait_s=self.load.began_s - asked_s, read_s=self.load.read_s, check_s=self.load.check_s)
