"""Finished images by content hash, on disk, limited in bytes and age.

One thread changes files and another one reads them, so that readers do not wait for writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from bottega.clocks import Clock, SteadyClock
from bottega.errors import DataLoss, StorageUnavailable, TooLarge
from bottega.storage import folders, os_errors
from bottega.storage.blob_files import BlobFiles, ContentReader, check, damaged
from bottega.storage.folders import ProcessLock
from bottega.storage.thread import FairThread, SerialThread

ResultT = TypeVar("ResultT")

_DIGEST = re.compile(r"[0-9a-f]{64}")
# Duration of one sweep. An unlink takes some tens of microseconds, or a millisecond for the largest files.
_SLICE_S = 0.002
# A file that was changed longer ago gets another time with its next change: file systems count in milliseconds.
_SETTLED_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """An image in the index."""

    owners: set[str]
    """Owners that stored the image. The image is deleted when all of them have released it."""
    size_bytes: int
    time: float
    """Time of the last put or renewal, on the store's steady clock."""
    trusted: bool
    """Whether the file was written or checked since the start, and was not damaged."""
    damaged: bool = False
    """Whether the file was found damaged."""
    checked: tuple[int, ...] = ()
    """Version of the file whose hash a reader has checked, as inode, size and times in ns; empty if none was."""


@dataclass(slots=True, kw_only=True)
class _Owned:
    """The images of an owner."""

    digests: dict[str, None] = field(default_factory=dict)
    """Digests of the images, the oldest first; the values are unused."""
    size_bytes: int = 0


class ContentStore:
    """A store that keeps images until they expire, within a budget.

    If the budget is exceeded, the owner with the most bytes loses its oldest images. So an owner whose images take no
    more than its share, which is the budget divided by the number of owners, loses none to others. An image that
    several owners have put counts for each of them.

    Call `open` before anything else. Every method may raise StorageUnavailable, and works again when the disk does. One
    process at a time may have a folder open.

    Args:
        budget_bytes: Maximum bytes of all images together.
        ttl_s: Seconds from the last put or renewal of an image until it expires.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, ttl_s: float, clock: Clock | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._path = folder
        self._lock = ProcessLock(folder)
        self._files = BlobFiles(folder, names=_DIGEST, synced=True)
        self._ttl_s = ttl_s
        self.steady = SteadyClock(clock or Clock())
        """Clock for the age of images, which does not jump with the machine's clock. Resume it before `open`: otherwise
        the machine's clock determines how long the store was closed."""
        self._pinned: Counter[str] = Counter()
        # Oldest first. The writer changes it, the reader only looks entries up.
        self._entries: dict[str, _Entry] = {}
        self._owned: dict[str, _Owned] = {}
        self._writer = SerialThread("content-writer")
        self._reader = FairThread("content-reader")
        self._opened = False
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def open(self) -> None:
        """Open the folder and read what it contains. It may be called again after a failure."""
        await self._writer.run(self._open)

    async def close(self) -> None:
        """Finish pending work and close the folder, so that another process may open it."""
        await self._reader.close()
        await self._writer.close()
        self._lock.release()

    @contextlib.contextmanager
    def pinned(self, digests: Collection[str]) -> Iterator[None]:
        """Do not evict these images during the `with` block. They must fit into the budget together."""
        self._pinned.update(digests)
        try:
            yield
        finally:
            self._pinned -= Counter(digests)

    @property
    def pins(self) -> frozenset[str]:
        """Digests of the images that are pinned now."""
        return frozenset(self._pinned)

    async def assign(self, owners: Mapping[str, Collection[str]]) -> None:
        """Assign owners to the images that were found at the start: the owners of each image, by digest."""
        await self._writer.run(lambda: self._assign(owners))

    async def put(self, digest: str, data: bytes, *, owner: str = "", job: str = "") -> None:
        """Store an image, and return when all of it is on the disk. One file serves all jobs, so `job` is not used.

        An existing image is renewed instead, after its file was checked once since the start. Raises TooLarge if the
        image exceeds the whole budget.

        Args:
            digest: The SHA-256 of the image.
        """
        if len(data) > self.budget_bytes:
            limit = {"limit": "results_bytes", "bytes": str(self.budget_bytes)}
            raise TooLarge("the image is larger than the budget for all images", metadata=limit)
        await self._writer.run(lambda: self._put(digest, data, owner))

    async def renew(self, digest: str, *, owner: str = "", job: str = "") -> bool:
        """Extend the time until an image expires, as `put` would. Return False if it is missing or damaged."""
        return await self._writer.run(lambda: self._renew(digest))

    async def release(self, digest: str, *, owner: str, put_before: float, job: str = "", needed: bool = False) -> None:
        """Remove an image from an owner, and delete it if it has no other owner. Do nothing if it does not exist.

        Args:
            put_before: Time on the store's clock. An image that was put or renewed later stays, because it is needed.
            needed: Whether another job of the owner has the image. Then it stays.
        """
        if not needed:
            await self._writer.run(lambda: self._release(digest, owner, put_before))

    async def get(self, digest: str) -> bytes | None:
        """Return an image; None if it does not exist. Raise DataLoss if it is damaged."""
        reader = await self.reader(digest)
        if reader is None:
            return None
        async with reader:
            return await reader.read(0, reader.size_bytes)

    async def reader(self, digest: str, *, owner: str = "") -> ContentReader | None:
        """Return a reader of an image, which the caller closes; None if the image is gone. Owners are served in turns.

        The hash of the whole file is checked first, because a caller cannot take back what it has sent; that takes
        about a millisecond per MiB, once for each version of the file. Damage during the reading is noticed only if the
        file gets shorter. Raises DataLoss if the image is damaged.
        """
        return await self._reader.run(lambda: self._read(digest, owner), owner=owner)

    def holds(self, digest: str) -> bool:
        """Return whether the image is in the index. This does not look at the disk."""
        entry = self._entries.get(digest)
        return entry is not None and not entry.damaged and entry.time + self._ttl_s > self.steady()

    async def probe(self) -> None:
        """Write and remove a file, as a test of the disk."""
        await self._writer.run(self._probe)

    async def sweep(self) -> bool:
        """Delete expired images for a few milliseconds, oldest first. Return whether there are more."""
        return await self._writer.run(self._sweep)

    async def clear(self) -> None:
        """Open the folder and delete all images."""
        await self._writer.run(self._clear)

    def _clear(self) -> None:
        if not self._opened:
            self._open()
        for digest in list(self._entries):
            self._drop(digest)

    def _open(self) -> None:
        with os_errors.translated():
            folders.make_own(self._path)
            self._lock.acquire()
            self._files.clear()
            found = [(file.name, file.stat()) for file in self._files.scan()]
        now = self.steady()
        self._entries, self._owned, self.size_bytes = {}, {}, 0
        for digest, status in sorted(found, key=lambda file: file[1].st_mtime):
            # A clock that was wrong once must not keep a file for ever: a time in the future counts as now.
            time = now - max(0.0, now - status.st_mtime)
            self._enter(digest, _Entry(owners={""}, size_bytes=status.st_size, time=time, trusted=False))
        self._opened = True

    def _assign(self, owners: Mapping[str, Collection[str]]) -> None:
        found, self._owned = self._entries, {}
        self._entries, self.size_bytes = {}, 0
        for digest, entry in found.items():
            self._enter(digest, replace(entry, owners=set(owners.get(digest, ())) or entry.owners))

    def _put(self, digest: str, data: bytes, owner: str) -> None:
        self._keep_in_place()
        with os_errors.translated():
            entry, now = self._entries.get(digest), self.steady()
            confirms = entry is not None and not entry.trusted
            if entry and self._is_there(digest, len(data), checked=confirms, synced=confirms):
                os.utime(self._files.path(digest), (now, now))
            else:
                self._make_room(len(data), owner)
                self._files.write(digest, data, time=now)
        others = self._leave(digest)
        self._enter(digest, _Entry(owners={owner, *others}, size_bytes=len(data), time=now, trusted=True))

    def _renew(self, digest: str) -> bool:
        self._keep_in_place()
        entry, now = self._entries.get(digest), self.steady()
        if entry is None or entry.time + self._ttl_s <= now:
            return False
        with os_errors.translated():
            # A trusted file is certainly on the disk.
            if not self._is_there(digest, entry.size_bytes, checked=True, synced=not entry.trusted):
                entry.trusted, entry.damaged = False, True
                return False
            os.utime(self._files.path(digest), (now, now))
        owners = self._leave(digest)
        self._enter(digest, _Entry(owners=owners, size_bytes=entry.size_bytes, time=now, trusted=True))
        return True

    def _release(self, digest: str, owner: str, put_before: float) -> None:
        self._keep_in_place()
        entry = self._entries.get(digest)
        if entry is None or owner not in entry.owners or entry.time > put_before:
            return
        if len(entry.owners) == 1:
            self._drop(digest)
        else:
            entry.owners.discard(owner)
            self._disown(owner, digest, entry.size_bytes)

    def _read(self, digest: str, owner: str) -> ContentReader | None:
        self._check_opened()
        entry = self._entries.get(digest)
        if entry is None or entry.time + self._ttl_s <= self.steady():
            return None
        with os_errors.translated():
            try:
                descriptor = self._files.open_file(digest)
            except FileNotFoundError:
                if self._entries.get(digest) is entry:  # this process has not removed it
                    entry.trusted, entry.damaged = False, True
                    raise damaged(digest) from None
                return None
            status = os.fstat(descriptor)
            reader = ContentReader(self._reader, descriptor, digest, size_bytes=status.st_size, owner=owner)
            version = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            if entry.checked == version:
                return reader
            try:
                check(descriptor, digest)
            except DataLoss:
                entry.trusted, entry.damaged = False, True
                raise
            if abs(time.time() - status.st_ctime) > _SETTLED_S:
                entry.checked = version
            return reader

    def _is_there(self, digest: str, size_bytes: int, *, checked: bool, synced: bool) -> bool:
        """Return whether a file has this size and, if `checked`, its hash. If `synced`, also sync it to the disk."""
        try:
            descriptor = self._files.open_file(digest)
        except FileNotFoundError:
            return False
        try:
            if os.fstat(descriptor).st_size != size_bytes:
                return False
            if checked:
                check(descriptor, digest)
            if synced:
                folders.sync(self._files.path(digest).parent)
        except DataLoss:
            return False
        finally:
            os.close(descriptor)
        return True

    def _probe(self) -> None:
        self._keep_in_place()
        self._files.probe()

    def _sweep(self) -> bool:
        self._keep_in_place()
        until = time.perf_counter() + _SLICE_S
        oldest = self.steady() - self._ttl_s
        while self._entries:
            digest, entry = next(iter(self._entries.items()))
            if entry.time > oldest:
                break
            self._drop(digest)  # before the time is looked at, so that every sweep makes progress
            if time.perf_counter() > until:
                return True
        while self.size_bytes > self.budget_bytes:
            if time.perf_counter() > until:
                return True
            if not self._evict_one("", 0):
                break
        return False

    def _make_room(self, size_bytes: int, owner: str) -> None:
        while self.size_bytes + size_bytes > self.budget_bytes and self._evict_one(owner, size_bytes):
            pass

    def _evict_one(self, owner: str, size_bytes: int) -> bool:
        """Remove the oldest image of the owner with the most bytes, where `owner` counts with `size_bytes` more.

        Return False if all remaining images are pinned.
        """
        added = {owner: size_bytes}
        by_use = sorted(self._owned, key=lambda name: -self._owned[name].size_bytes - added.get(name, 0))
        for name in by_use:
            oldest = next((digest for digest in self._owned[name].digests if digest not in self._pinned), None)
            if oldest is None:
                continue
            entry = self._entries[oldest]
            if len(entry.owners) == 1:
                self._drop(oldest)
            else:
                entry.owners.discard(name)
                self._disown(name, oldest, entry.size_bytes)
            return True
        return False

    def _drop(self, digest: str) -> None:
        # Removed from the index first, so that a reader that finds no file knows why.
        entry = self._entries[digest]
        self._leave(digest)
        try:
            self._files.remove([digest])
        except StorageUnavailable:
            later, self._entries = self._entries, {}
            self._enter(digest, entry, oldest=True)
            self._entries |= later
            raise

    def _enter(self, digest: str, entry: _Entry, *, oldest: bool = False) -> None:
        """Add an image to the index, as the newest image of each of its owners or, with `oldest`, as the oldest."""
        self._entries[digest] = entry
        self.size_bytes += entry.size_bytes
        for owner in entry.owners:
            owned = self._owned.setdefault(owner, _Owned())
            if oldest:
                owned.digests = {digest: None, **owned.digests}
            else:
                owned.digests[digest] = None
            owned.size_bytes += entry.size_bytes

    def _leave(self, digest: str) -> set[str]:
        """Remove an image from the index and return its owners; none if it is not there."""
        entry = self._entries.pop(digest, None)
        if entry is None:
            return set()
        self.size_bytes -= entry.size_bytes
        for owner in entry.owners:
            self._disown(owner, digest, entry.size_bytes)
        return entry.owners

    def _disown(self, owner: str, digest: str, size_bytes: int) -> None:
        owned = self._owned[owner]
        del owned.digests[digest]
        owned.size_bytes -= size_bytes
        if not owned.digests:
            del self._owned[owner]

    def _keep_in_place(self) -> None:
        """Create and read the folder again if it was deleted since it was opened."""
        self._check_opened()
        with os_errors.translated():
            if self._lock.in_place and self._files.in_place:
                return
        _log.error("the folder of images was deleted; it is created again", extra={"folder": str(self._path)})
        self._lock.release()
        self._open()

    def _check_opened(self) -> None:
        if not self._opened:
            raise os_errors.unavailable("the storage is not open", cause=os_errors.NOT_OPEN)
