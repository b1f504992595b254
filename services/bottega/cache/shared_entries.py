"""The entries of a cache that shares them with others: records in PostgreSQL, files in S3, copies of files on disk.

    s3://bucket/prefix/ab/<entry>@<step>    files, named as in a folder
    s3://bucket/prefix/owner/ab/<ID>        ID of the database that has the records
    tier/                                   copies of files, the least recently used of which are deleted

An object is written before the record that names it, and deleted after that. A cache that is killed in between leaves
objects without a record, which the caches look for and delete when they are an hour old.

Import this module only where a database is configured: it needs the extra `postgresql`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from bottega.addons.interface.store_link import rank_stores
from bottega.blobstore.records import RecordChanges
from bottega.blobstore.writer import lock_folder
from bottega.cache.latent import EntryRecord
from bottega.cache.records import TakeEntries
from bottega.cache.shared_records import LIFE_S, SharedRecords, claim_objects
from bottega.errors import BottegaError, ConfigError, DataLoss, StorageUnavailable
from bottega.storage import BlobFiles, os_errors
from bottega.storage.folders import ProcessLock
from bottega.storage.objects import ObjectStore
from bottega.storage.postgresql_thread import DatabaseThread

ResultT = TypeVar("ResultT")

_SIGN_S = 5.0
# The bound on operations of the database: short ones, and those that wait for other caches.
_CHANGE_S, _MOVE_S = 20.0, 320.0
# A job waits for its answer for some ten milliseconds; a later one may still serve it.
_READ_S = 1.0
READ_REQUEST_S = 1.0
"""The bound on a request that reads an object, so that its thread is free soon after the cache gave up."""
# After a failed read, reads fail at once for so long.
_AWAY_S = 1.0
# The bounds on writing the files of one entry and on removing files.
_WRITE_S, _REMOVE_S = 60.0, 60.0
# Reads have threads of their own, so that slow writes do not delay them.
_READS, _WRITES = 8, 8
# Entries that are read at once; their embeddings take a few megabytes.
_PAGE = 1000
# Bound on the files to be deleted; objects beyond are found by the search for objects without a record.
_MAX_GARBAGE = 10_000
# The names of objects begin with two hex digits: those of one pair are searched so often, all in four hours.
_SEARCH_S = 60.0
_SHARDS = [f"{number:02x}" for number in range(256)]
# Younger objects may get their record yet.
_ORPHAN_S = 3600.0

_log = logging.getLogger(__name__)


class FilesInObjects:
    """Files in an object store, with copies in a folder. Any thread may call it. It raises StorageUnavailable.

    Args:
        reading: The same object store, whose requests end after READ_REQUEST_S, so that threads do not hang in reads
            for which nobody waits any more.
        local_bytes: Upper bound on the bytes of the copies.
    """

    def __init__(self, objects: ObjectStore, tier: BlobFiles, *, reading: ObjectStore, local_bytes: int) -> None:
        self.objects = objects
        self._reading = reading
        self._tier = tier
        self._local_bytes = local_bytes
        self._lock = threading.Lock()
        self._copies: OrderedDict[str, int] = OrderedDict()
        """Sizes by name, the last used last."""
        self._used_bytes = 0
        self._readers = ThreadPoolExecutor(_READS, thread_name_prefix="object reads")
        self._writers = ThreadPoolExecutor(_WRITES, thread_name_prefix="object writes")
        self._away_until = 0.0
        self._is_away = False

    def open(self) -> None:
        """Create or open the folder, and note the copies in it."""
        self._tier.clear()
        copies = sorted(self._tier.objects(), key=lambda copy: -copy.age_s)
        with self._lock:
            self._copies = OrderedDict((copy.name, copy.size_bytes) for copy in copies)
            self._used_bytes = sum(self._copies.values())
        self._keep({})

    def close(self) -> None:
        """Drop transfers that have not begun."""
        for threads in (self._readers, self._writers):
            threads.shutdown(wait=False, cancel_futures=True)

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        """Return a file; None if it does not exist or is damaged. After a failure, fail at once for a while."""
        with suppress(StorageUnavailable):
            if name in self._copies and (copy := self._tier.read(name, digest=digest, size_bytes=size_bytes)):
                with self._lock:
                    if name in self._copies:
                        self._copies.move_to_end(name)
                return copy
        if time.monotonic() < self._away_until:
            raise os_errors.unavailable("the object store is away", cause="ETIMEDOUT")
        read = partial(self._reading.read, name, digest=digest, size_bytes=size_bytes)
        try:
            data = _result(self._readers, read, _READ_S)
        except StorageUnavailable as error:
            self._note_away(error)
            raise os_errors.unavailable("the object store is away", cause="ETIMEDOUT") from error
        if self._is_away:
            self._is_away = False
            _log.info("cached latents can be read from the object store again")
        if data is not None:
            self._keep({name: data})
        return data

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write files at the same time. After an error, some may be written."""
        writes = [_submit(self._writers, partial(self.objects.write, name, data)) for name, data in files.items()]
        done = wait(writes, _WRITE_S).done
        if len(done) < len(writes):
            for writing in writes:
                writing.cancel()
            raise os_errors.unavailable("the object store does not answer", cause="ETIMEDOUT")
        for written in writes:
            written.result()
        self._keep(files)

    def remove(self, names: Collection[str]) -> None:
        """Remove files. Ignore those that do not exist."""
        self._forget(names)
        _result(self._writers, partial(self.objects.remove, names), _REMOVE_S)

    def _note_away(self, error: StorageUnavailable) -> None:
        """Log the first failure of an outage."""
        self._away_until = time.monotonic() + _AWAY_S
        if not self._is_away:
            _log.warning("cached latents cannot be read from the object store", extra={"text": error.message})
        self._is_away = True

    def _keep(self, files: Mapping[str, bytes]) -> None:
        """Write copies, and delete the least recently used ones. A failure costs time, not the file."""
        with suppress(StorageUnavailable):
            self._tier.check_room(sum(map(len, files.values())))
            for name, data in files.items():
                self._tier.write(name, data)
                with self._lock:
                    self._used_bytes += len(data) - self._copies.pop(name, 0)
                    self._copies[name] = len(data)
        with self._lock:
            excess_bytes, gone = self._used_bytes - self._local_bytes, []
            for name, size_bytes in self._copies.items():
                if excess_bytes <= 0:
                    break
                gone.append(name)
                excess_bytes -= size_bytes
        self._forget(gone)

    def _forget(self, names: Iterable[str]) -> None:
        """Delete copies."""
        with self._lock:
            known = [name for name in names if name in self._copies]
            self._used_bytes -= sum(self._copies.pop(name) for name in known)
        with suppress(StorageUnavailable):
            self._tier.remove(known)


def _submit(threads: ThreadPoolExecutor, do: Callable[[], ResultT]) -> Future[ResultT]:
    try:
        return threads.submit(do)
    except RuntimeError:
        raise os_errors.unavailable("the storage is closed", cause=os_errors.NOT_OPEN) from None


def _result(threads: ThreadPoolExecutor, do: Callable[[], ResultT], timeout_s: float) -> ResultT:
    """Return the result of a call in another thread, within a time. Raise StorageUnavailable."""
    running = _submit(threads, do)
    try:
        return running.result(timeout_s)
    except TimeoutError:
        running.cancel()
        text = f"the object store does not answer within {timeout_s:g} s"
        raise os_errors.unavailable(text, cause="ETIMEDOUT") from None


class SharedEntries:
    """An EntryDisk whose entries are in PostgreSQL and in an object store, which other caches use as well.

    Args:
        folder: The cache's folder.
        database: Started already; the caller closes it after this.
        owner: A store for the ID of the database, whose names match OWNER_NAMES.
        name: Name of the cache in the fleet.
    """

    def __init__(
        self,
        folder: Path,
        database: DatabaseThread,
        records: SharedRecords,
        files: FilesInObjects,
        *,
        owner: ObjectStore,
        name: str,
    ) -> None:
        self._files = files
        self._owner = owner
        self._is_owner = False
        self._folder = folder
        self._lock = ProcessLock(folder)
        self._database = database
        self._records = records
        self._name = name
        self._changes = RecordChanges()
        self._garbage: list[str] = []
        self._used_bytes = 0
        self._living: dict[str, int] = {}
        """Bytes of all living caches by name, as of the last renewal of the registration."""
        self._names: set[str] = set()
        """Living caches at the last `join`, which assigned owners by them."""
        self._has_moved = False
        self._is_lost = False
        self._gives_signs = False
        self._shards = itertools.cycle(_SHARDS)
        for _ in range(random.randrange(len(_SHARDS))):
            next(self._shards)
        self._search_due_s = 0.0

    @property
    def sharing(self) -> int:
        return len(self._living)

    def lock(self) -> None:
        lock_folder(self._folder, self._lock)

    def unlock(self) -> None:
        self._lock.release()

    def open(self) -> bool:
        self._files.open()
        self._join()
        self._is_lost = False
        if not self._gives_signs:
            self._gives_signs = True
            self._database.call_soon(lambda: self._database.create_task(self._give_signs()))
        return True

    def probe(self) -> None:
        self._files.objects.probe()
        try:
            self.check_owner()
        except ConfigError as error:
            raise os_errors.unavailable(error.message, cause=os_errors.BUSY) from error

    def check_owner(self) -> None:
        """Note in the bucket which database the objects belong to; see claim_objects. Raise StorageUnavailable."""
        if self._is_owner:
            return
        claim_objects(self._owner, self._database.run(self._records.owner_id(), _CHANGE_S), self._database.place)
        self._is_owner = True

    def close(self) -> None:
        """Let another cache have this one's name."""
        with suppress(BottegaError):
            self._database.run(self._records.leave(), _SIGN_S)
        self._files.close()

    def read(self, name: str, *, digest: bytes, size_bytes: int) -> bytes | None:
        return self._files.read(name, digest=digest, size_bytes=size_bytes)

    def load_entries(self, known: Collection[int], take: TakeEntries) -> Collection[int]:
        own = self._database.run(self._records.numbers(), _CHANGE_S)
        new = sorted(own.keys() - set(known), key=lambda number: (own[number], number))
        for first in range(0, len(new), _PAGE):
            found, useless = self._database.run(self._records.read(new[first : first + _PAGE]), _CHANGE_S)
            self._changes.gone.update(useless)
            for key, records in itertools.groupby(found, key=lambda record: record.entry.key):
                take(key, list(records))
        return set(known) - own.keys()

    def parameters(self, numbers: Collection[int]) -> dict[int, bytes]:
        return self._database.run(self._records.parameters(numbers), _CHANGE_S)

    def exchange_profiles(self, own: Mapping[str, bytes]) -> Mapping[str, bytes]:
        return self._database.run(self._records.exchange_profiles(own), _CHANGE_S)

    def set_profile(self, model_hash: str, profile: bytes) -> None:
        self._database.run(self._records.set_profile(model_hash, profile), _CHANGE_S)

    def make_room(self) -> None:
        """Do nothing: eviction enforces the budget, not free space."""

    def write_files(self, files: Mapping[str, bytes]) -> None:
        self._files.write(files)

    def write_entries(self, changes: RecordChanges, records: Collection[EntryRecord]) -> None:
        self._changes.add(changes)
        if not (self._changes or records):
            return
        try:
            self._database.run(self._records.write(self._changes, records), _CHANGE_S)
        except (StorageUnavailable, DataLoss):
            self._has_moved = True  # the records may have been written
            raise
        self._changes = RecordChanges()

    def discard(self, names: Iterable[str]) -> None:
        self._garbage += itertools.islice(names, _MAX_GARBAGE - len(self._garbage))

    def tidy(self, changes: RecordChanges) -> None:
        """Write the changes, then delete discarded files, and some that have no record."""
        self.write_entries(changes, ())
        while self._garbage:
            self._remove_unrecorded(self._garbage[-_PAGE:])
            del self._garbage[-_PAGE:]
        if time.monotonic() >= self._search_due_s:
            self._search_due_s = time.monotonic() + _SEARCH_S
            shard = next(self._shards)
            # Other caches may have recorded what belongs here while workers had no link to this one.
            self._has_moved = self._has_moved or shard.endswith("0")
            self._search(shard)

    def renew(self, used_bytes: int) -> bool:
        self._used_bytes = used_bytes
        if self._is_lost:
            raise DataLoss(f"this cache did not renew its registration for {LIFE_S:.0f} s; it reads its entries again")
        if not self._has_moved:
            return False
        self._join()
        return True

    def budget_bytes(self, budget_bytes: int) -> int:
        """Return an equal share of the budget, or what other caches leave of it if that is more."""
        others_bytes = sum(size_bytes for name, size_bytes in self._living.items() if name != self._name)
        return max(budget_bytes // max(1, len(self._living)), budget_bytes - others_bytes)

    def _join(self) -> None:
        self._has_moved = False
        try:
            names = self._database.run(self._records.join(), _MOVE_S)
        except (StorageUnavailable, DataLoss):
            self._has_moved = True
            raise
        if names != self._names:
            _log.info("the caches that share entries have changed", extra={"caches": sorted(names)})
        self._names = names
        self._living = {name: self._living.get(name, 0) for name in names}

    def _remove_unrecorded(self, names: Collection[str]) -> int:
        """Remove those files that no record names: another cache may have the others by now. Return how many."""
        gone = set(names) - self._database.run(self._records.recorded(names), _CHANGE_S)
        if gone:
            self._files.remove(gone)
        return len(gone)

    def _search(self, shard: str) -> None:
        """Delete objects without a record whose names begin so, if that is this cache's turn."""
        if not self._is_owner or rank_stores(self._names, shard)[0] != self._name:
            return
        old = (file.name for file in self._files.objects.objects(shard) if file.age_s > _ORPHAN_S)
        removed = 0
        while page := list(itertools.islice(old, _PAGE)):
            removed += self._remove_unrecorded(page)
        if removed:
            _log.info("objects without a record were deleted", extra={"objects": removed})
        self._database.run(self._records.forget_caches(), _CHANGE_S)

    async def _give_signs(self) -> None:
        """Tell other caches that this one lives, and learn of them. Runs in the database's thread."""
        while True:
            await asyncio.sleep(_SIGN_S)
            try:
                self._living = await self._records.give_sign(self._used_bytes)
            except BottegaError:
                continue  # the writer reports outages
            self._is_lost = self._is_lost or self._name not in self._living
            self._has_moved = self._has_moved or self._living.keys() != self._names
