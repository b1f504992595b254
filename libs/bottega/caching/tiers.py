"""The tiers of a TieredCache, its entries in memory, and what it leases."""

from __future__ import annotations

import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from bottega.v1.trace_pb2 import StoreTimes


class Tier(StrEnum):
    """Where a file was when somebody asked for it.

    MEMORY: it was there already, and not only because of this. LOADED: it was read from the disk into memory for this:
    it was on its way, or it had come ahead and this is the first to have it. DISK: memory had no room for it.
    """

    MEMORY = "memory"
    LOADED = "loaded"
    DISK = "disk"


@dataclass(slots=True, kw_only=True)
class TierStatistics:
    """What has happened since the start. by_tier: leases, by where the file was. load_s: seconds of loading."""

    by_tier: Counter[Tier]
    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    failures: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheLease:
    """Bytes that stay readable until it is given back, whatever else is loaded or deleted. Read them with os.preadv.

    resident: in memory, sealed. times: from when it was asked for until it began, at begun_s on the monotonic clock.
    """

    digest: str
    descriptor: int
    size_bytes: int
    tier: Tier
    resident: bool
    times: StoreTimes
    begun_s: float = field(default_factory=time.monotonic)

    def times_until_now(self) -> StoreTimes:
        """Its times, and for how long it has waited to be sent."""
        times = StoreTimes(send_wait_s=time.monotonic() - self.begun_s)
        times.MergeFrom(self.times)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """What whoever asks knows of a file, so that the disk is not asked. group: of files that are used together."""

    size_bytes: int
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParts:
    """What loading a file took. began_s: on the monotonic clock."""

    began_s: float
    read_s: float
    check_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class CacheEntry:
    """A file in memory, or on its way there until `loaded` ends.

    leases: that have not ended. awaits_fetch: it was loaded for a fetch that is still to come. load: of what was read
    from the disk. group: see KnownFile. forgotten: it is let go as soon as it is idle.
    """

    descriptor: int
    size_bytes: int
    loaded: Future[None] = field(default_factory=Future)
    awaits_fetch: bool
    leases: int = 0
    load: LoadParts | None = None
    group: str = ""
    forgotten: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, and has no lease."""
        return self.loaded.done() and not self.leases

    def times(self, asked_s: float) -> StoreTimes:
        """Of a lease that was asked for then and begins now. A load that was under way before was only waited for."""
        if self.load is None or self.load.began_s < asked_s:
            return StoreTimes(wait_s=time.monotonic() - asked_s)
        return StoreTimes(wait_s=self.load.began_s - asked_s, read_s=self.load.read_s, check_s=self.load.check_s)
