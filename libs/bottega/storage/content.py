"""Finished images by content hash, on the disk, within a budget of bytes and time.

All that changes files runs in one thread, all that reads them in another, so that a write never waits for the
event loop, nor a reader for a write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from bottega.clocks import Clock, SteadyClock
from bottega.errors import DataLoss, TooLarge
from bottega.storage import os_errors
from bottega.storage.content_files import ContentFolder, check, damaged
from bottega.storage.fair_thread import FairStorageThread
from bottega.storage.thread import StorageThread

ResultT = TypeVar("ResultT")

# One call of sweep; an unlink takes some tens of microseconds, and those of the largest files a millisecond.
_SLICE_S = 0.002
_FOREIGN_NAMES_IN_LOG = 5
# A file that changed so long ago gets another time with its next change: file systems count in milliseconds.
_SETTLED_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Entry:
    """time: on the store's steady clock. trusted: written, or checked, since the start, and not seen damaged. damaged:
    seen so.
    """

    owners: set[str]
    """Who put it: it goes when none of them keeps it."""
    size_bytes: int
    time: float
    trusted: bool
    damaged: bool = False
    checked: tuple[int, ...] = ()
    """Version of the file whose hash was found right by a reader: inode, size and times in ns."""


@dataclass(slots=True, kw_only=True)
class _Owned:
    """What an owner has."""

    digests: dict[str, None] = field(default_factory=dict)
    """Oldest first."""
    size_bytes: int = 0


class ContentReader:
    """One image, part by part; it stays readable when the store drops it meanwhile. An async context manager."""

    def __init__(self, thread: FairStorageThread, descriptor: int, digest: str, *, size_bytes: int, owner: str) -> None:
        self._thread = thread
        self._owner = owner
        self._descriptor: int | None = descriptor
        self._digest = digest
        self.size_bytes = size_bytes

    async def read(self, offset: int, size_bytes: int) -> bytes:
        """The bytes from `offset` on, as many as there are up to `size_bytes`.

        Raises DataLoss when the file has become shorter, StorageUnavailable when it cannot be read.
        """
        size_bytes = max(0, min(size_bytes, self.size_bytes - offset))
        return await self._thread.run(lambda: self._read(offset, size_bytes), owner=self._owner)

    def close(self) -> None:
        """Read no more. Harmless when it was closed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    async def __aenter__(self) -> ContentReader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # a caller that was cancelled while it asked for a reader never got it

    def _read(self, offset: int, size_bytes: int) -> bytes:
        assert self._descriptor is not None, "read after close"
        with os_errors.translated():
            data = os.pread(self._descriptor, size_bytes, offset)
        if len(data) != size_bytes:
            raise damaged(self._digest)
        return data


class ContentStore:
    """Keeps images until their time is over; when the budget is used up, the owner that has most loses its oldest ones.

    So an owner whose images take no more than its share, which is the budget divided by the owners that have images,
    loses none of them through another. An image that several have put counts for each.

    Open it before anything else. Every method may raise StorageUnavailable, and works again when the disk does.
    One process at a time may have a folder open.

    budget_bytes: of all images together. ttl_s: seconds since an image was last put, whatever the machine's clock is
    set to meanwhile. steady: the time by which they age; let it go on from an earlier life before `open`, or a time at
    which no store was open is what the machine's clock says.
    """

    def __init__(self, folder: Path, *, budget_bytes: int, ttl_s: float, clock: Clock | None = None) -> None:
        self.budget_bytes = budget_bytes
        self._path = folder
        self._folder = ContentFolder(folder)
        self._ttl_s = ttl_s
        self.steady = SteadyClock(clock or Clock())
        self._pinned: Counter[str] = Counter()
        # Oldest first. Only the writer changes it; the reader looks things up.
        self._entries: dict[str, _Entry] = {}
        self._owned: dict[str, _Owned] = {}
        self._writer = StorageThread("content-writer")
        self._reader = FairStorageThread("content-reader")
        self._opened = False
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def open(self) -> None:
        """Takes over the folder and learns what is there. May be called again after it failed."""
        await self._writer.run(self._open)

    async def close(self) -> None:
        """Ends after what was begun; another process may have the folder then."""
        await self._reader.close()
        await self._writer.close()
        self._folder.close()

    @contextlib.contextmanager
    def pinned(self, digests: Collection[str]) -> Iterator[None]:
        """In the block none of these goes to make room for another: several that belong together are put in it.

        All that are pinned at any time must be within the budget together.
        """
        self._pinned.update(digests)
        try:
            yield
        finally:
            self._pinned -= Counter(digests)

    @property
    def pins(self) -> frozenset[str]:
        """The digests that are pinned now."""
        return frozenset(self._pinned)

    async def assign(self, owners: Mapping[str, Collection[str]]) -> None:
        """Say whose the images are that were found at the start. owners: by digest."""
        await self._writer.run(lambda: self._assign(owners))

    async def put(self, digest: str, data: bytes, *, owner: str = "") -> None:
        """Keep an image under its SHA-256; it is on the disk when this returns, and half of it never is.

        One that is there already has its time renewed and is not written again; after a start it is checked once.
        Raise TooLarge for one that is beyond the whole budget.
        """
        if len(data) > self.budget_bytes:
            limit = {"limit": "results_bytes", "bytes": str(self.budget_bytes)}
            raise TooLarge("the image is larger than all that may be kept", metadata=limit)
        await self._writer.run(lambda: self._put(digest, data, owner))

    async def renew(self, digest: str) -> bool:
        """Renews the time of an image, as another `put` would. False when it has gone, or is not what it was."""
        return await self._writer.run(lambda: self._renew(digest))

    async def release(self, digest: str, *, owner: str, put_before: float) -> None:
        """Drop an image of an owner, at once; where others have it too, it stays theirs.

        Args:
            digest: One that is not there does no harm.
            owner: Whose it is no more.
            put_before: By the store's clock. An image that was put, or renewed, since stays: somebody needs it.
        """
        await self._writer.run(lambda: self._release(digest, owner, put_before))

    async def get(self, digest: str) -> bytes | None:
        """The image, or None when it has gone. Raises DataLoss when it is not what it was: never wrong bytes."""
        reader = await self.reader(digest)
        if reader is None:
            return None
        async with reader:
            return await reader.read(0, reader.size_bytes)

    async def reader(self, digest: str, *, owner: str = "") -> ContentReader | None:
        """Return what reads the image part by part, or None when it has gone. Close it. Those of owners take turns.

        The whole hash is checked here, before the first part goes out: a caller cannot take back what it has sent,
        and hashing takes about a millisecond per MiB. It is checked once for each version of the file. What happens to
        the file while it is being read is seen only if it gets shorter. Raises DataLoss.
        """
        return await self._reader.run(lambda: self._read(digest, owner), owner=owner)

    def holds(self, digest: str) -> bool:
        """Whether the image is there and good, as far as is known without a look at the disk."""
        entry = self._entries.get(digest)
        return entry is not None and not entry.damaged and entry.time + self._ttl_s > self.steady()

    async def probe(self) -> None:
        """Returns when something could be written, and was taken away again."""
        await self._writer.run(self._probe)

    async def sweep(self) -> bool:
        """Drops what has expired, oldest first, for a few milliseconds at most. Whether there is more to drop."""
        return await self._writer.run(self._sweep)

    def _open(self) -> None:
        with os_errors.translated():
            scan = self._folder.open()
        now = self.steady()
        files = sorted(scan.files, key=lambda file: file.time)
        self._entries, self._owned, self.size_bytes = {}, {}, 0
        for file in files:
            # A clock that was wrong once must not keep a file for ever: a time to come is now.
            time = now - max(0.0, now - file.time)
            self._enter(file.digest, _Entry(owners={""}, size_bytes=file.size_bytes, time=time, trusted=False))
        self._opened = True
        if scan.foreign:
            names = scan.foreign[:_FOREIGN_NAMES_IN_LOG]
            _log.warning("left alone what is no image", extra={"folder": str(self._path), "names": names})

    def _assign(self, owners: Mapping[str, Collection[str]]) -> None:
        found, self._owned = self._entries, {}
        self._entries, self.size_bytes = {}, 0
        for digest, entry in found.items():
            self._enter(digest, replace(entry, owners=set(owners.get(digest, ())) or entry.owners))

    def _put(self, digest: str, data: bytes, owner: str) -> None:
        self._keep_in_place()
        with os_errors.translated():
            entry, now = self._entries.get(digest), self.steady()
            if entry and self._folder.confirm(digest, size_bytes=len(data), thoroughly=not entry.trusted):
                self._folder.renew(digest, time=now)
            else:
                self._make_room(len(data), owner)
                self._folder.write(digest, data, time=now)
        others = self._leave(digest)
        self._enter(digest, _Entry(owners={owner, *others}, size_bytes=len(data), time=now, trusted=True))

    def _renew(self, digest: str) -> bool:
        self._keep_in_place()
        entry, now = self._entries.get(digest), self.steady()
        if entry is None or entry.time + self._ttl_s <= now:
            return False
        with os_errors.translated():
            if entry.trusted:  # it is on the disk for certain: there is nothing to wait for
                intact = self._folder.is_intact(digest)
            else:
                intact = self._folder.confirm(digest, size_bytes=entry.size_bytes, thoroughly=True)
            if not intact:
                entry.trusted, entry.damaged = False, True
                return False
            self._folder.renew(digest, time=now)
        owners = self._leave(digest)
        self._enter(digest, _Entry(owners=owners, size_bytes=entry.size_bytes, time=now, trusted=True))
        return True

    def _release(self, digest: str, owner: str, put_before: float) -> None:
        self._keep_in_place()
        entry = self._entries.get(digest)
        if entry is None or owner not in entry.owners or entry.time > put_before:
            return
        with os_errors.translated():
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
                descriptor = self._folder.open_file(digest)
            except FileNotFoundError:
                if self._entries.get(digest) is entry:  # nobody of ours has removed it
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

    def _probe(self) -> None:
        self._keep_in_place()
        with os_errors.translated():
            self._folder.probe()

    def _sweep(self) -> bool:
        self._keep_in_place()
        until = time.perf_counter() + _SLICE_S
        oldest = self.steady() - self._ttl_s
        with os_errors.translated():
            while self._entries:
                digest, entry = next(iter(self._entries.items()))
                if entry.time > oldest:
                    break
                if time.perf_counter() > until:
                    return True
                self._drop(digest)
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
        """Take the oldest image from the owner that has most, counting what `owner` wants to add.

        Return False where all that is left is pinned.
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
        # Out of the index first: a reader that finds no file then knows why.
        entry = self._entries[digest]
        self._leave(digest)
        try:
            self._folder.remove(digest)
        except OSError:
            later, self._entries = self._entries, {}
            self._enter(digest, entry, oldest=True)
            self._entries |= later
            raise

    def _enter(self, digest: str, entry: _Entry, *, oldest: bool = False) -> None:
        """Take an image into the index, as the newest one, or as the oldest of its owners."""
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
        """Take an image out of the index, if it is there, and return whose it was."""
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
        """Make the folder again, and learn what is there, where somebody has deleted it since it was opened."""
        self._check_opened()
        with os_errors.translated():
            if self._folder.in_place:
                return
        _log.error("the folder of images was deleted; it is made again", extra={"folder": str(self._path)})
        self._folder.close()
        self._open()

    def _check_opened(self) -> None:
        if not self._opened:
            raise os_errors.unavailable("the storage is not open", cause=os_errors.NOT_OPEN)
