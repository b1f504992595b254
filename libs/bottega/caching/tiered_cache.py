"""A cache of files in two tiers: host memory within a budget, over the disk.

The memory tier consists of anonymous files (memfd) that are sealed once they are loaded. Other processes of this host
get the same files, and can only read them. When the cache drops a file that other processes have, its pages count in
their budgets from then on. Files are loaded in parallel, one load for each file. If pinned and leased files leave no
space for a file, it is read from the disk. Files on disk are never passed to other processes, because a process that
reads such a file crashes if it is shortened. Pinned files are loaded as soon as they fit. Keys are SHA-256 digests, by
which a file is checked when it is first loaded, or whenever it is read from the disk.

Files of one group are used together, in order. The least recently used group is evicted first, and its last used file
first, so that the remaining files are those with which its next use begins. No call waits for the disk under the lock.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from bottega.caching.lru_cache import LruCache
from bottega.caching.sealed_files import check, load
from bottega.caching.tiers import CacheEntry, CacheLease, KnownFile, LoadParts, Tier, TierFiles, TierStatistics
from bottega.errors import BottegaError, DataLoss, StorageUnavailable
from bottega.process import open_files
from bottega.storage import os_errors
from bottega.transport.memory import new_file
from bottega.v1.trace_pb2 import StoreTimes

_log = logging.getLogger(__name__)


class TieredCache:
    """A cache of files in host memory over the disk. Thread-safe.

    Args:
        files: The files on the disk.
        what: What a file is called in error messages.
        missing: Returns the error for a digest without a file.
        budget_bytes: Budget of the memory tier.
        max_entries: Maximum number of files in memory; each holds a file descriptor.
        max_loads: Maximum number of concurrent loads.
        on_damaged: Called with the digest of a damaged file by the thread that read it. If given, files are checked
            whenever they are read from the disk, including those that do not fit into memory.
        spared: Returns the groups to evict last; called under the lock.
    """

    def __init__(
        self,
        files: TierFiles,
        *,
        what: str,
        missing: Callable[[str], BottegaError],
        budget_bytes: int,
        max_entries: int,
        max_loads: int,
        on_damaged: Callable[[str], None] | None = None,
        spared: Callable[[], Collection[str]] = frozenset,
    ) -> None:
        self.counts = TierStatistics(by_tier=Counter())
        self._files = files
        self._what = what
        self._missing = missing
        self._on_damaged = on_damaged
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._memory = LruCache[CacheEntry](
            budget_bytes=budget_bytes,
            max_entries=max_entries,
            on_evict=self._let_go,
            order=self._eviction_order,
        )
        self._spared = spared
        # The files in memory by group, in order of use, the last used last. A file without a group is its own group.
        self._groups: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        # Pinned files without room so far.
        self._awaited: dict[str, KnownFile] = {}
        self._leases: Counter[str] = Counter()
        self._trusted: set[str] = set()
        # Whether the last load failed because the storage was unavailable. That is logged when it begins.
        self._unavailable = False
        self._pool = ThreadPoolExecutor(max_workers=max_loads, thread_name_prefix=f"{what} loads")

    @property
    def used_bytes(self) -> int:
        """Bytes of the files in memory, including those being loaded."""
        with self._lock:
            return self._memory.used_bytes

    def state(self, digest: str) -> bool | None:
        """Return whether the file is in memory: False while it is being loaded, None if it is not."""
        entry = self._memory.get(digest)
        return None if entry is None else entry.loaded.done()

    def leases(self, digest: str) -> int:
        """Return the number of open leases of a file."""
        return self._leases[digest]

    def wait_idle(self, seconds: float) -> bool:
        """Block until there are no leases, for at most `seconds`. Return whether there are none."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._leases, seconds)

    def pin(self, digests: Iterable[str]) -> None:
        """Pin exactly these files: they are loaded as soon as they fit, and then stay in memory.

        A digest without a file is not loaded. Pin it again when the file exists.
        """
        pinned = {digest: self._look_at(digest) for digest in digests}
        with self._lock:
            self._memory.pinned = frozenset(pinned)
            self._awaited = {
                digest: file
                for digest, file in pinned.items()
                if self._entry(digest, file, awaits_fetch=False) is None and file is not None
            }

    def prefetch(self, digest: str, file: KnownFile | None = None) -> bool:
        """Load a file before it is needed, if it fits. Return whether it does."""
        known = file or self._look_at(digest)
        with self._lock:
            return self._entry(digest, known) is not None

    def adopt(self, digest: str, descriptor: int, file: KnownFile) -> bool:
        """Add a sealed file that is already in memory and has this digest. Return whether it fits.

        The cache owns the descriptor from then on, and closes it if the file does not fit.
        """
        with self._lock:
            present = self._memory.get(digest)
            gone = None
            if present is not None:
                present.forgotten = False
            else:
                gone = self._memory.make_room(file.size_bytes)
            if gone is None:
                os.close(descriptor)
                return False
            self.counts.evictions += gone
            entry = CacheEntry(descriptor=descriptor, size_bytes=file.size_bytes, group=file.group, awaits_fetch=False)
            entry.loaded.set_result(None)
            self._add(digest, entry)
            return True

    def borrow(self, digest: str, file: KnownFile | None = None) -> Future[CacheLease]:
        """Lease the bytes of a file. Return the lease as a future.

        The future fails with `missing`, DataLoss or StorageUnavailable.
        """
        asked_s = time.monotonic()
        known = file or self._look_at(digest)
        with self._lock:
            self._leases[digest] += 1
            entry = self._entry(digest, known)
            if entry is not None:
                tier = Tier.LOADED if entry.awaits_fetch or not entry.loaded.done() else Tier.MEMORY
                entry.awaits_fetch = False
                entry.leases += 1
                self.counts.by_tier[tier] += 1
        outcome: Future[CacheLease] = Future()
        if entry is None:
            self._pool.submit(self._lease_from_disk, digest, outcome, asked_s=asked_s)
        else:
            lease = functools.partial(entry.lease, digest, tier, asked_s)
            entry.loaded.add_done_callback(lambda loaded: self._lend(digest, lease, loaded, outcome))
        return outcome

    def give_back(self, lease: CacheLease) -> None:
        """End a lease."""
        with self._lock:
            self._uncount(lease.digest)
            entry = self._memory.get(lease.digest)
            if lease.resident and entry is not None and entry.descriptor == lease.descriptor:
                entry.leases -= 1
                self._evict_forgotten(lease.digest, entry)
                self._load_awaited()
                return
        os.close(lease.descriptor)

    def forget(self, digest: str) -> None:
        """Drop a deleted file from memory as soon as it is neither leased nor being loaded."""
        with self._lock:
            self._trusted.discard(digest)
            self._memory.pinned -= {digest}
            self._awaited.pop(digest, None)
            entry = self._memory.get(digest)
            if entry is not None:
                entry.forgotten = True
                self._evict_forgotten(digest, entry)
                self._load_awaited()

    def close(self) -> None:
        """Stop loading, and release the memory."""
        with self._lock:
            self._awaited.clear()
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._memory.clear()

    def _look_at(self, digest: str) -> KnownFile | None:
        """Look up a file on the disk. Return None if the file is in memory or does not exist."""
        if self._memory.get(digest) is not None:
            return None
        try:
            size_bytes = self._files.size_of(digest)
        except OSError:  # reading it raises the reason
            return None
        return None if size_bytes is None else KnownFile(size_bytes=size_bytes)

    def _entry(self, digest: str, file: KnownFile | None, *, awaits_fetch: bool = True) -> CacheEntry | None:
        """Return the entry of a file in memory, after starting its load if needed; None if it does not fit or exist.

        Call it under the lock.

        Args:
            file: None if nothing is known about the file. It is not loaded then.
            awaits_fetch: Whether a new load is for a request that is expected soon.
        """
        found = self._memory.get(digest)
        if found is not None:
            found.forgotten = False
            self._use(digest, found)
            return found
        gone = self._memory.make_room(file.size_bytes) if file is not None else None
        if file is None or gone is None:
            return None
        self.counts.evictions += gone
        try:
            descriptor = new_file(self._what.lower())
        except OSError as error:  # probably no descriptor is left; the read from the disk raises that
            _log.warning("a %s cannot be kept in memory", self._what, extra={"digest": digest, "why": error.strerror})
            return None
        entry = CacheEntry(
            descriptor=descriptor, size_bytes=file.size_bytes, group=file.group, awaits_fetch=awaits_fetch
        )
        self._add(digest, entry)
        self._pool.submit(self._load, digest, entry)
        return entry

    def _add(self, digest: str, entry: CacheEntry) -> None:
        """Add an entry as the most recently used. Call it under the lock."""
        self._memory.add(digest, entry)
        self._use(digest, entry)

    def _use(self, digest: str, entry: CacheEntry) -> None:
        """Mark an entry and its group as the most recently used. Call it under the lock."""
        group = entry.group or digest
        files = self._groups.setdefault(group, OrderedDict())
        files[digest] = None
        files.move_to_end(digest)
        self._groups.move_to_end(group)

    def _eviction_order(self) -> Iterator[str]:
        """Yield all digests in eviction order. Call it under the lock."""
        spared = self._spared()
        last = []
        for group, files in self._groups.items():
            if group in spared:
                last.append(files)
            else:
                yield from reversed(files)
        for files in last:
            yield from reversed(files)

    def _let_go(self, digest: str, entry: CacheEntry) -> None:
        """Close an evicted entry. Call it under the lock."""
        os.close(entry.descriptor)
        group = entry.group or digest
        self._groups[group].pop(digest)
        if not self._groups[group]:
            del self._groups[group]

    def _evict_forgotten(self, digest: str, entry: CacheEntry) -> None:
        """Evict a deleted file if nothing needs it any more. Call it under the lock."""
        if entry.forgotten and entry.is_idle:
            self._memory.evict([digest])

    def _load_awaited(self) -> None:
        """Start the loads of pinned files that fit now. Call it under the lock."""
        self._awaited = {
            digest: file
            for digest, file in self._awaited.items()
            if self._entry(digest, file, awaits_fetch=False) is None
        }

    def _load(self, digest: str, entry: CacheEntry) -> None:
        """Load a file into memory. Runs in a thread of the pool."""
        began_s = time.monotonic()
        try:
            check_s = self._copy(digest, entry)
        except BaseException as error:  # noqa: BLE001 - it is raised where the load is awaited
            self._note_damage(digest, error)
            # Logged here, because nothing awaits a file that is loaded ahead.
            facts = {"digest": digest, "why": str(error)}
            if not self._unavailable:
                _log.error("a %s cannot be loaded into memory", self._what, extra=facts)
            self._unavailable = isinstance(error, StorageUnavailable)
            with self._lock:
                self.counts.failures += 1
                self._memory.evict([digest])
            entry.loaded.set_exception(error)
        else:
            load_s = time.monotonic() - began_s
            self._unavailable = False
            with self._lock:
                self.counts.loads += 1
                self.counts.loaded_bytes += entry.size_bytes
                self.counts.load_s += load_s
            entry.load = LoadParts(began_s=began_s, read_s=load_s - check_s, check_s=check_s)
            entry.loaded.set_result(None)
        with self._lock:  # its room is free, or it may be evicted from now on
            if self._memory.get(digest) is entry:
                self._evict_forgotten(digest, entry)
            self._load_awaited()

    def _copy(self, digest: str, entry: CacheEntry) -> float:
        """Copy the file into memory. Return the seconds that the checksum took."""
        source = self._open(digest)
        try:
            # Checked once since the start, which also detects for all workers that a disk has changed a bit.
            known = None if digest in self._trusted else digest
            check_s = load(source, entry.descriptor, entry.size_bytes, digest=known, what=self._what)
        finally:
            os.close(source)
        if self._on_damaged is None:
            self._trusted.add(digest)
        return check_s

    def _lend(
        self, digest: str, lease: Callable[[], CacheLease], loaded: Future[None], outcome: Future[CacheLease]
    ) -> None:
        """Complete the lease of a file in memory after it is loaded."""
        if (error := loaded.exception()) is not None:
            self._refuse(digest, error, outcome)
        else:
            outcome.set_result(lease())

    def _lease_from_disk(self, digest: str, outcome: Future[CacheLease], *, asked_s: float) -> None:
        """Complete the lease of a file on disk. Runs in a thread of the pool."""
        began_s = time.monotonic()
        try:
            descriptor = self._open_checked(digest)
        except BottegaError as error:
            self._note_damage(digest, error)
            self._refuse(digest, error, outcome)
            return
        with self._lock:
            self.counts.by_tier[Tier.DISK] += 1
        outcome.set_result(
            CacheLease(
                digest=digest,
                descriptor=descriptor,
                size_bytes=os.fstat(descriptor).st_size,
                tier=Tier.DISK,
                resident=False,
                times=StoreTimes(wait_s=began_s - asked_s, check_s=time.monotonic() - began_s),
            )
        )

    def _refuse(self, digest: str, error: BaseException, outcome: Future[CacheLease]) -> None:
        with self._lock:
            self._uncount(digest)
        outcome.set_exception(error)

    def _open_checked(self, digest: str) -> int:
        descriptor = self._open(digest)
        if self._on_damaged is not None:
            try:
                check(descriptor, digest, what=self._what)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor

    def _note_damage(self, digest: str, error: BaseException) -> None:
        if self._on_damaged is not None and isinstance(error, DataLoss):
            self._on_damaged(digest)

    def _open(self, digest: str) -> int:
        try:
            return self._files.open_file(digest)
        except FileNotFoundError:
            raise self._missing(digest) from None
        except OSError as error:
            if open_files.is_cause(error):
                raise open_files.too_many(error) from error
            raise StorageUnavailable(
                f"the {self._what} {digest[:12]} cannot be read: {error.strerror}",
                retry_after_s=os_errors.RETRY_AFTER_S,
            ) from error

    def _uncount(self, digest: str) -> None:
        self._leases[digest] -= 1
        if not self._leases[digest]:
            del self._leases[digest]
            self._idle.notify_all()
