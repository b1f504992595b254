"""Values of a TieredCache: its tiers, its entries in memory, and its leases."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from bottega.v1.trace_pb2 import StoreTimes


class Tier(StrEnum):
    """The place from which a request for a file was served."""

    MEMORY = "memory"
    """The file was already in memory, and had been used before."""
    LOADED = "loaded"
    """The file was still being loaded, or was loaded early for this request."""
    DISK = "disk"
    """The file is read from disk, because it does not fit into memory."""


class TierFiles(Protocol):
    """The files on the disk under a TieredCache, by digest."""

    def size_of(self, digest: str) -> int | None:
        """Return a file's size, None if it is unknown, without waiting for a network. Raises OSError."""

    def open_file(self, digest: str) -> int:
        """Return a descriptor that reads a file. A thread that loads calls it. Raises OSError and BottegaError."""


class FilesByPath:
    """The files of a folder.

    Args:
        path: Returns the path of a digest's file.
    """

    def __init__(self, path: Callable[[str], Path]) -> None:
        self._path = path

    def size_of(self, digest: str) -> int | None:
        """Return a file's size. Raises OSError."""
        return self._path(digest).stat().st_size

    def open_file(self, digest: str) -> int:
        """Return a descriptor that reads a file. Raises OSError."""
        return os.open(self._path(digest), os.O_RDONLY | os.O_CLOEXEC)


@dataclass(slots=True, kw_only=True)
class TierStatistics:
    """Counters since the start."""

    by_tier: Counter[Tier]
    """Number of leases, by the tier that served them."""
    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    """Seconds of loading, summed over loads."""
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
    """Whether the bytes are in sealed memory."""
    times: StoreTimes
    """Times of the store from the request until the lease began."""
    begun_s: float = field(default_factory=time.monotonic)
    """Time at which the lease began, on the monotonic clock."""

    def times_until_now(self) -> StoreTimes:
        """Return the times of the store, with the time since the lease began as waiting to be sent."""
        times = StoreTimes(send_wait_s=time.monotonic() - self.begun_s)
        times.MergeFrom(self.times)
        return times


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """Properties of a file that a caller knows, which save a lookup on the disk."""

    size_bytes: int
    group: str = ""
    """Group of files that are used together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadParts:
    """How long each part of a file's load took."""

    began_s: float
    """Time of the start, on the monotonic clock."""
    read_s: float
    check_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class CacheEntry:
    """A file in memory, which is being loaded until `loaded` is done."""

    descriptor: int
    size_bytes: int
    loaded: Future[None] = field(default_factory=Future)
    awaits_fetch: bool
    """Whether the file was loaded for a request that is expected soon."""
    leases: int = 0
    """Number of open leases."""
    load: LoadParts | None = None
    """Durations of the load; None if the file was not read from the disk."""
    group: str = ""
    """Group of files that are used together."""
    forgotten: bool = False
    """Whether the file was deleted, so that the entry is evicted as soon as it is idle."""

    @property
    def is_idle(self) -> bool:
        """Whether the entry is loaded and has no lease."""
        return self.loaded.done() and not self.leases

    def lease(self, digest: str, tier: Tier, asked_s: float) -> CacheLease:
        """Return a lease that begins now, for a request at the time `asked_s` on the monotonic clock."""
        return CacheLease(
            digest=digest,
            descriptor=self.descriptor,
            size_bytes=self.size_bytes,
            tier=tier,
            resident=True,
            times=self._times(asked_s),
        )

    def _times(self, asked_s: float) -> StoreTimes:
        """Return the times of a lease that begins now. The part of a load before the request does not count."""
        if self.load is None or self.load.began_s < asked_s:
            return StoreTimes(wait_s=time.monotonic() - asked_s)
        return StoreTimes(wait_s=self.load.began_s - asked_s, read_s=self.load.read_s, check_s=self.load.check_s)
