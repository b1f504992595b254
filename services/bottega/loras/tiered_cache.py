"""Where a LoRA's bytes are read from: host memory within a budget, over the disk.

What is in memory lies in files without a name (memfd), sealed once they are loaded: workers of this host are given
those themselves, and whoever has one can only read it. Where memory lets one go that workers have, its pages are
theirs from then on, and in their budgets. Loads run in parallel, one for each LoRA. What finds no room in memory,
because all that is there is pinned or being sent, is sent from the disk; a file of the disk is given to nobody, for
who shortens it would end those who read it. What is pinned is loaded as soon as there is room. Knows digests and bytes;
knows no names and no links.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bottega.errors import BottegaError, LoraNotFound, StorageUnavailable
from bottega.loras.lru_cache import CacheEntry, LruCache
from bottega.loras.sealed_files import load
from bottega.process import open_files
from bottega.storage import os_errors
from bottega.transport.memory.sealed_file import new_file

_log = logging.getLogger(__name__)


class Tier(StrEnum):
    """Where a LoRA was when somebody asked for it.

    MEMORY: it was there already, and not only because of this. LOADED: it was read from the disk into memory for this:
    it was on its way, or it had come ahead and this is the first to have it. DISK: memory had no room for it.
    """

    MEMORY = "memory"
    LOADED = "loaded"
    DISK = "disk"


@dataclass(slots=True, kw_only=True)
class TierStatistics:
    """What has happened since the start. by_tier: loans, by where the LoRA was. load_s: seconds of loading."""

    by_tier: Counter[Tier]
    loads: int = 0
    loaded_bytes: int = 0
    load_s: float = 0.0
    failures: int = 0
    evictions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheLease:
    """Bytes that stay readable until it is given back, whatever else is loaded or deleted. Read them with os.preadv.

    resident: in memory, sealed.
    """

    digest: str
    descriptor: int
    size_bytes: int
    tier: Tier
    resident: bool


class TieredCache:
    """Any thread may call it.

    file: where the LoRA of a digest is. budget_bytes, most: of what is in memory; each holds a file descriptor.
    at_once: loads that run.
    """

    def __init__(self, file: Callable[[str], Path], *, budget_bytes: int, most: int, at_once: int) -> None:
        self.counts = TierStatistics(by_tier=Counter())
        self._file = file
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._residents = LruCache(budget_bytes=budget_bytes, most=most)
        # Pinned, and without room or file so far.
        self._awaited: deque[str] = deque()
        self._lent: Counter[str] = Counter()
        self._trusted: set[str] = set()
        self._pool = ThreadPoolExecutor(max_workers=at_once, thread_name_prefix="lora-load")

    @property
    def used_bytes(self) -> int:
        """Of what is in memory, or on its way there."""
        with self._lock:
            return self._residents.used_bytes

    def state(self, digest: str) -> bool | None:
        """Whether it is in memory; False while it is on its way there, None where it is not."""
        resident = self._residents.get(digest)
        return None if resident is None else resident.loaded.done()

    def lent(self, digest: str) -> int:
        """Loans of it that have not been given back."""
        return self._lent[digest]

    def wait_idle(self, seconds: float) -> bool:
        """Whether nothing is lent, or will not be within so many seconds. It blocks."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._lent, seconds)

    def pin(self, digests: Iterable[str]) -> None:
        """These, and no others, are loaded as soon as there is room, and stay in memory once they are there."""
        with self._lock:
            pinned = list(digests)
            self._residents.pinned = frozenset(pinned)
            self._awaited = deque(digest for digest in pinned if self._resident(digest, awaits_fetch=False) is None)

    def prefetch(self, digest: str) -> bool:
        """Has it in memory soon, where there is room; whether it will be."""
        with self._lock:
            return self._resident(digest) is not None

    def borrow(self, digest: str) -> Future[CacheLease]:
        """The LoRA's bytes, as soon as they can be read. It fails with LoraNotFound, DataLoss, StorageUnavailable."""
        with self._lock:
            self._lent[digest] += 1
            resident = self._resident(digest)
            if resident is not None:
                tier = Tier.LOADED if resident.awaits_fetch or not resident.loaded.done() else Tier.MEMORY
                resident.awaits_fetch = False
                resident.loans += 1
                self.counts.by_tier[tier] += 1
        outcome: Future[CacheLease] = Future()
        if resident is None:
            self._pool.submit(self._from_disk, digest, outcome)
        else:
            resident.loaded.add_done_callback(lambda loaded: self._lend(digest, resident, tier, loaded, outcome))
        return outcome

    def give_back(self, loan: CacheLease) -> None:
        """Ends a loan."""
        with self._lock:
            self._return(loan.digest)
            resident = self._residents.get(loan.digest)
            if loan.resident and resident is not None and resident.descriptor == loan.descriptor:
                resident.loans -= 1
                self._load_awaited()
                return
        os.close(loan.descriptor)

    def forget(self, digest: str) -> None:
        """It is deleted: memory lets it go."""
        with self._lock:
            self._trusted.discard(digest)
            self._residents.pinned -= {digest}
            if digest in self._awaited:
                self._awaited.remove(digest)
            resident = self._residents.get(digest)
            if resident is not None and resident.loaded.done() and not resident.loans:
                self._residents.let_go([digest])
                self._load_awaited()

    def close(self) -> None:
        """Loads nothing more, and gives the memory back."""
        with self._lock:
            self._awaited.clear()
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._residents.clear()

    def _resident(self, digest: str, *, awaits_fetch: bool = True) -> CacheEntry | None:
        """The LoRA in memory, or being loaded from now on; None where it has no room or no file. Under the lock.

        awaits_fetch: of one that is loaded from now on.
        """
        found = self._residents.use(digest)
        if found is not None:
            return found
        try:
            size_bytes = self._file(digest).stat().st_size
        except OSError:
            return None  # whoever reads it from the disk says why
        gone = self._residents.make_room(size_bytes)
        if gone is None:
            return None
        self.counts.evictions += gone
        try:
            descriptor = new_file("lora")
        except OSError as error:  # no descriptor is left, most likely: whoever reads it from the disk says so
            _log.warning("a LoRA cannot be had in memory", extra={"digest": digest, "why": error.strerror})
            return None
        resident = CacheEntry(descriptor=descriptor, size_bytes=size_bytes, awaits_fetch=awaits_fetch)
        self._residents.add(digest, resident)
        self._pool.submit(self._load, digest, resident)
        return resident

    def _load_awaited(self) -> None:
        """Begins to load what is pinned and could not be loaded before; each is tried once. Under the lock.

        One that has still no room or no file waits on, and keeps none of the others from its own.
        """
        for _ in range(len(self._awaited)):
            digest = self._awaited.popleft()
            if self._resident(digest, awaits_fetch=False) is None:
                self._awaited.append(digest)

    def _load(self, digest: str, resident: CacheEntry) -> None:
        """In a thread of the pool."""
        began = time.monotonic()
        try:
            self._copy(digest, resident)
        except BaseException as error:  # noqa: BLE001 - it is raised where the load is awaited
            # Nobody awaits what is loaded ahead.
            _log.error("a LoRA cannot be loaded into memory", extra={"digest": digest, "why": str(error)})
            with self._lock:
                self.counts.failures += 1
                self._residents.let_go([digest])
            resident.loaded.set_exception(error)
        else:
            with self._lock:
                self.counts.loads += 1
                self.counts.loaded_bytes += resident.size_bytes
                self.counts.load_s += time.monotonic() - began
            resident.loaded.set_result(None)
        with self._lock:  # it has left its room, or may be let go from now on
            self._load_awaited()

    def _copy(self, digest: str, resident: CacheEntry) -> None:
        source = self._open(digest)
        try:
            # Once since the start: a disk that has changed a bit is noticed here, and by every worker.
            check = None if digest in self._trusted else digest
            load(source, resident.descriptor, resident.size_bytes, digest=check)
        finally:
            os.close(source)
        self._trusted.add(digest)

    def _lend(
        self, digest: str, resident: CacheEntry, tier: Tier, loaded: Future[None], outcome: Future[CacheLease]
    ) -> None:
        error = loaded.exception()
        if error is None:
            outcome.set_result(
                CacheLease(
                    digest=digest,
                    descriptor=resident.descriptor,
                    size_bytes=resident.size_bytes,
                    tier=tier,
                    resident=True,
                )
            )
            return
        with self._lock:
            self._return(digest)
        outcome.set_exception(error)

    def _from_disk(self, digest: str, outcome: Future[CacheLease]) -> None:
        """In a thread of the pool."""
        try:
            descriptor = self._open(digest)
        except BottegaError as error:
            with self._lock:
                self._return(digest)
            outcome.set_exception(error)
            return
        with self._lock:
            self.counts.by_tier[Tier.DISK] += 1
        size_bytes = os.fstat(descriptor).st_size
        outcome.set_result(
            CacheLease(digest=digest, descriptor=descriptor, size_bytes=size_bytes, tier=Tier.DISK, resident=False)
        )

    def _open(self, digest: str) -> int:
        try:
            return os.open(self._file(digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise LoraNotFound("the store has no LoRA of that digest", metadata={"loras": digest}) from None
        except OSError as error:
            if open_files.is_cause(error):
                raise open_files.too_many(error) from error
            raise StorageUnavailable(
                f"the LoRA {digest[:12]} cannot be read: {error.strerror}", retry_after_s=os_errors.RETRY_AFTER_S
            ) from error

    def _return(self, digest: str) -> None:
        self._lent[digest] -= 1
        if not self._lent[digest]:
            del self._lent[digest]
            self._idle.notify_all()
