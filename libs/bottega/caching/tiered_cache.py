"""Files read through two tiers: host memory within a budget, over the disk.

The memory tier consists of files without a name (memfd), sealed once they are loaded: other processes of this host
get the same files, and can only read them. When the cache drops a file that other processes have, its pages count in
their budgets from then on. Loads run in parallel, one for each file. A file for which there is no room in memory,
because all of it is pinned or leased, is read from the disk. Files of the disk are never given to other processes: a
process that reads one ends when somebody shortens it. Pinned files are loaded as soon as there is room. Keys are
SHA-256, by which a file is checked when it is loaded for the first time, or whenever it is read from the disk.

Files of one group are used together: the group that was used longest ago goes first, and of it the file that was used
last, so that what is left of it are those that its next use begins with. The disk is never waited for under the lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bottega.caching.lru_cache import LruCache
from bottega.caching.sealed_files import check, load
from bottega.caching.tiers import CacheEntry, CacheLease, KnownFile, LoadParts, Tier, TierStatistics
from bottega.errors import BottegaError, DataLoss, StorageUnavailable
from bottega.process import open_files
from bottega.storage import os_errors
from bottega.transport.memory.sealed_file import new_file
from bottega.v1.trace_pb2 import StoreTimes

_log = logging.getLogger(__name__)


class TieredCache:
    """Any thread may call it.

    path: where the file of a digest is. what: a file is, for people. missing: the error for a digest without a file.
    budget_bytes, max_entries: of what is in memory; each holds a file descriptor. max_loads: that run at once.
    on_damaged: called with the digest of a file that is damaged, by the thread that has read it. Where it is given,
    files are checked whenever they are read from the disk, those that memory has no room for included. spared: asked
    for the groups that go last, under the lock.
    """

    def __init__(
        self,
        path: Callable[[str], Path],
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
        self._path = path
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
        # Of each group what is in memory; groups and files in them that were used last at the end. A file without a
        # group is one by itself.
        self._groups: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        # Pinned, and without room so far.
        self._awaited: dict[str, KnownFile] = {}
        self._leases: Counter[str] = Counter()
        self._trusted: set[str] = set()
        self._pool = ThreadPoolExecutor(max_workers=max_loads, thread_name_prefix=f"{what} loads")

    @property
    def used_bytes(self) -> int:
        """Of what is in memory, or on its way there."""
        with self._lock:
            return self._memory.used_bytes

    def state(self, digest: str) -> bool | None:
        """Whether it is in memory; False while it is on its way there, None where it is not."""
        entry = self._memory.get(digest)
        return None if entry is None else entry.loaded.done()

    def leases(self, digest: str) -> int:
        """Those of it that have not been given back."""
        return self._leases[digest]

    def wait_idle(self, seconds: float) -> bool:
        """Whether nothing is leased, or will not be within so many seconds. It blocks."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._leases, seconds)

    def pin(self, digests: Iterable[str]) -> None:
        """These, and no others, are loaded as soon as there is room, and stay in memory once they are there.

        One without a file is not loaded: pin it again when it has one.
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
        """Has it in memory soon, where there is room; whether it will be."""
        known = file or self._look_at(digest)
        with self._lock:
            return self._entry(digest, known) is not None

    def adopt(self, digest: str, descriptor: int, file: KnownFile) -> bool:
        """Takes a sealed file that is in memory already, and has this digest; whether there was room.

        The descriptor is the cache's from then on; where it is not taken it is closed.
        """
        with self._lock:
            there = self._memory.get(digest)
            gone = None
            if there is not None:
                there.forgotten = False
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
        """The file's bytes, as soon as they can be read. It fails with `missing`, DataLoss, StorageUnavailable."""
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
            entry.loaded.add_done_callback(
                lambda loaded: self._lease(digest, entry, tier, loaded, outcome, asked_s=asked_s)
            )
        return outcome

    def give_back(self, lease: CacheLease) -> None:
        """Ends a lease."""
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
        """It is deleted: memory lets it go, as soon as it is neither lent nor on its way."""
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
        """Loads nothing more, and gives the memory back."""
        with self._lock:
            self._awaited.clear()
        self._pool.shutdown(cancel_futures=True)
        with self._lock:
            self._memory.clear()

    def _look_at(self, digest: str) -> KnownFile | None:
        """Of a file that is not in memory; None where there is none, or nothing has to be known. Asks the disk."""
        if self._memory.get(digest) is not None:
            return None
        try:
            return KnownFile(size_bytes=self._path(digest).stat().st_size)
        except OSError:
            return None  # reading it from the disk raises why

    def _entry(self, digest: str, file: KnownFile | None, *, awaits_fetch: bool = True) -> CacheEntry | None:
        """The file in memory, or being loaded from now on; None where it has no room or no file. Under the lock.

        file: None where nothing is known, and it is not loaded then. awaits_fetch: of one that is loaded from now on.
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
        except OSError as error:  # no descriptor is left, most likely: reading it from the disk raises that
            _log.warning("a %s cannot be had in memory", self._what, extra={"digest": digest, "why": error.strerror})
            return None
        entry = CacheEntry(
            descriptor=descriptor, size_bytes=file.size_bytes, group=file.group, awaits_fetch=awaits_fetch
        )
        self._add(digest, entry)
        self._pool.submit(self._load, digest, entry)
        return entry

    def _add(self, digest: str, entry: CacheEntry) -> None:
        """Under the lock."""
        self._memory.add(digest, entry)
        self._use(digest, entry)

    def _use(self, digest: str, entry: CacheEntry) -> None:
        """It is what was used last, with its group. Under the lock."""
        group = entry.group or digest
        files = self._groups.setdefault(group, OrderedDict())
        files[digest] = None
        files.move_to_end(digest)
        self._groups.move_to_end(group)

    def _eviction_order(self) -> Iterator[str]:
        """Under the lock."""
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
        """It is evicted. Under the lock."""
        os.close(entry.descriptor)
        group = entry.group or digest
        self._groups[group].pop(digest)
        if not self._groups[group]:
            del self._groups[group]

    def _evict_forgotten(self, digest: str, entry: CacheEntry) -> None:
        """Where nothing keeps it any more. Under the lock."""
        if entry.forgotten and entry.is_idle:
            self._memory.evict([digest])

    def _load_awaited(self) -> None:
        """Begins to load what is pinned and could not be loaded before; what has still no room waits on. Under the
        lock.
        """
        self._awaited = {
            digest: file
            for digest, file in self._awaited.items()
            if self._entry(digest, file, awaits_fetch=False) is None
        }

    def _load(self, digest: str, entry: CacheEntry) -> None:
        """In a thread of the pool."""
        began_s = time.monotonic()
        try:
            check_s = self._copy(digest, entry)
        except BaseException as error:  # noqa: BLE001 - it is raised where the load is awaited
            self._note_damage(digest, error)
            # Nobody awaits what is loaded ahead.
            facts = {"digest": digest, "why": str(error)}
            _log.error("a %s cannot be loaded into memory", self._what, extra=facts)
            with self._lock:
                self.counts.failures += 1
                self._memory.evict([digest])
            entry.loaded.set_exception(error)
        else:
            load_s = time.monotonic() - began_s
            with self._lock:
                self.counts.loads += 1
                self.counts.loaded_bytes += entry.size_bytes
                self.counts.load_s += load_s
            entry.load = LoadParts(began_s=began_s, read_s=load_s - check_s, check_s=check_s)
            entry.loaded.set_result(None)
        with self._lock:  # it has left its room, or may be let go from now on
            if self._memory.get(digest) is entry:
                self._evict_forgotten(digest, entry)
            self._load_awaited()

    def _copy(self, digest: str, entry: CacheEntry) -> float:
        """Returns the seconds that comparing the checksum took."""
        source = self._open(digest)
        try:
            # Once since the start: a disk that has changed a bit is noticed here, and by every worker.
            known = None if digest in self._trusted else digest
            check_s = load(source, entry.descriptor, entry.size_bytes, digest=known, what=self._what)
        finally:
            os.close(source)
        if self._on_damaged is None:
            self._trusted.add(digest)
        return check_s

    def _lease(
        self,
        digest: str,
        entry: CacheEntry,
        tier: Tier,
        loaded: Future[None],
        outcome: Future[CacheLease],
        *,
        asked_s: float,
    ) -> None:
        if (error := loaded.exception()) is not None:
            self._refuse(digest, error, outcome)
            return
        outcome.set_result(
            CacheLease(
                digest=digest,
                descriptor=entry.descriptor,
                size_bytes=entry.size_bytes,
                tier=tier,
                resident=True,
                times=entry.times(asked_s),
            )
        )

    def _lease_from_disk(self, digest: str, outcome: Future[CacheLease], *, asked_s: float) -> None:
        """In a thread of the pool."""
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
            return os.open(self._path(digest), os.O_RDONLY | os.O_CLOEXEC)
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
