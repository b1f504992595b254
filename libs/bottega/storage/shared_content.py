"""Finished images in an object store that several gateways share, with a local folder of limited bytes in front.

Each job has its own copy of each of its images: the object <SHA-256>-<owner>-<job>, where owner and job are hashes. So
a gateway deletes an object only by its exact name, and a copy that another gateway writes for another job at the same
moment stays. No lock and no leader is needed:

- A job relies only on copies that were written for it. An identical request gets a new copy of the stored result.
- Deleting a job deletes its copies, on whichever gateway. Copies of the same image for other jobs stay.
- Expired copies, and the oldest copies of the owner with the most bytes if the budget is exceeded, are deleted by any
  gateway. All gateways decide from the same listing, so they choose the same copies.
- A copy that was written less than a minute ago is never evicted by another gateway, because its job may not be in the
  job store yet.

Each gateway lists the objects once a minute, so the budget may be exceeded by what others write in that time. Ages are
measured by the clock of the object store, not by the clocks of the gateways.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from bottega.errors import BottegaError, DataLoss, StorageUnavailable, TooLarge
from bottega.storage.blob_files import ContentReader, damaged
from bottega.storage.content import ContentStore
from bottega.storage.objects import ObjectStore, StoredObject
from bottega.storage.os_errors import unavailable
from bottega.storage.thread import FairThread, FairTurns

ResultT = TypeVar("ResultT")
Sign = Callable[[str], str]

OBJECT_NAMES = re.compile(r"[0-9a-f]{64}-[0-9a-f]{16}-[0-9a-f]{16}")
"""Names of the objects: content, owner and job."""
_REFRESH_S = 60.0
# Objects that are listed at once, with a deadline for each such page.
_PAGE = 1000
# Copies of other gateways are evicted only when they are older, and their jobs are in the job store.
_SETTLED_S = 60.0
# Ages have an error of up to a second; copies count as that much younger.
_DOUBT_S = 2.0
_TRANSFERS = 16
# Longer than the object store's own deadline and retries take.
_WAIT_S = 60.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """A copy of an image that belongs to a job."""

    name: str
    size_bytes: int
    time: float
    """When it was written, on the steady clock of this gateway."""
    own: bool
    """Whether this process has written it."""

    @property
    def digest(self) -> str:
        return self.name[:64]

    @property
    def owner(self) -> str:
        return self.name[65:81]


class SharedContentStore:
    """A ContentStore whose images are objects that several gateways share. It is used by one event loop.

    Args:
        objects: The store of objects, whose names match OBJECT_NAMES.
        local: The folder in front. It holds what this gateway wrote or read last, and each read checks its hash.
        budget_bytes: Maximum bytes of all copies together.
        ttl_s: Seconds from the writing of a copy until it expires.
        sign: Returns a URL for an object, by which anybody can read it for a while; None if there are to be no URLs.
    """

    def __init__(
        self, objects: ObjectStore, local: ContentStore, *, budget_bytes: int, ttl_s: float, sign: Sign | None = None
    ) -> None:
        self.budget_bytes = budget_bytes
        self.steady = local.steady
        self.size_bytes = 0
        self._objects = objects
        self._local = local
        self._ttl_s = ttl_s
        self._sign = sign
        self._copies: dict[str, dict[str, _Copy]] = {}
        """Copies by digest and name."""
        self._removed: set[str] = set()
        """Names that were removed since the last listing began."""
        self._listing: tuple[float, Iterator[StoredObject], set[str]] | None = None
        """Of the listing that goes on: when it began, the objects that are left, and the names so far."""
        self._refreshed_at: float | None = None
        self._threads = ThreadPoolExecutor(_TRANSFERS, thread_name_prefix="objects")
        self._turns = FairTurns(_TRANSFERS)
        self._memory = FairThread("content-memory")
        self._closed = False

    def __len__(self) -> int:
        return len(self._copies)

    async def open(self) -> None:
        """Open the local folder, and test the object store. It may be called again after a failure.

        Images can be read and written at once. The first `sweep` lists the objects, however many there are.
        """
        await self._local.open()
        await self._run(self._objects.probe)

    async def clear_local(self) -> None:
        """Empty the local folder, whose images are copies. A failure costs disk space and no image."""
        try:
            await self._local.clear()
        except BottegaError as error:
            _log.warning("the local folder of images could not be emptied", extra={"text": error.message})

    async def close(self) -> None:
        """Close the local folder. Transfers that have not begun are dropped."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._memory.close()
        await self._local.close()

    def pinned(self, digests: Collection[str]) -> contextlib.AbstractContextManager[None]:
        """Do not evict these images during the `with` block."""
        return self._local.pinned(digests)

    @property
    def pins(self) -> frozenset[str]:
        """Digests of the images that are pinned now."""
        return self._local.pins

    async def assign(self, owners: Mapping[str, Collection[str]]) -> None:
        """Assign owners to the images in the local folder. The names of the objects have theirs."""
        await self._local.assign(owners)

    async def put(self, digest: str, data: bytes, *, owner: str = "", job: str = "") -> None:
        """Write a copy of an image for a job, and return when the object store has it. Raise TooLarge."""
        if len(data) > self.budget_bytes:
            limit = {"limit": "results_bytes", "bytes": str(self.budget_bytes)}
            raise TooLarge("the image is larger than the budget for all images", metadata=limit)
        name = _name(digest, owner, job)
        await self._evict(len(data), name[65:81])
        await self._run(lambda: self._objects.write(name, data), owner=owner)
        self._removed.discard(name)
        self._enter(_Copy(name=name, size_bytes=len(data), time=self.steady(), own=True))
        await self._put_local(digest, data, owner)

    async def renew(self, digest: str, *, owner: str = "", job: str = "") -> bool:
        """Write a copy of a stored image for another job; without a job, only look. Return False if it is missing."""
        if not job:
            latest = max((copy.time for copy in await self._find(digest)), default=None)
            return latest is not None and latest + self._ttl_s - _SETTLED_S > self.steady()
        data = None
        with contextlib.suppress(DataLoss):
            data = await self.get(digest)
        if data is None:
            return False
        await self.put(digest, data, owner=owner, job=job)
        return True

    async def release(self, digest: str, *, owner: str, put_before: float, job: str = "", needed: bool = False) -> None:
        """Delete the copy of a job. The local file stays if another job needs it, or it was put after `put_before`."""
        name = _name(digest, owner, job)
        known = self._copies.get(digest, {}).get(name)
        await self._remove([known or _Copy(name=name, size_bytes=0, time=self.steady(), own=False)])
        await self._local.release(digest, owner=owner, put_before=put_before, needed=needed)

    async def get(self, digest: str) -> bytes | None:
        """Return an image; None if it does not exist. Raise DataLoss if it is damaged."""
        reader = await self.reader(digest)
        if reader is None:
            return None
        async with reader:
            return await reader.read(0, reader.size_bytes)

    async def reader(self, digest: str, *, owner: str = "") -> ContentReader | None:
        """Return a reader of an image, which the caller closes; None if the image is gone. Raise DataLoss.

        The bytes come from the local folder if it has them and their hash is right, else from the object store.
        """
        if not _DIGEST.fullmatch(digest):
            return None
        copies = await self._find(digest)
        if not copies:
            return None
        with contextlib.suppress(DataLoss, StorageUnavailable):  # the object store has it as well
            if (reader := await self._local.reader(digest, owner=owner)) is not None:
                return reader
        data = await self._read_any(digest, copies, owner)
        if data is None:
            return None
        if await self._put_local(digest, data, owner):
            with contextlib.suppress(DataLoss, StorageUnavailable):
                if (reader := await self._local.reader(digest, owner=owner)) is not None:
                    return reader
        return ContentReader.of_bytes(self._memory, data, digest, owner=owner)

    async def own_copy(self, digest: str, *, size_bytes: int, owner: str, job: str) -> ContentReader | None:
        """Return a reader of a job's copy, without the listing and the local folder; None if the copy is gone."""
        data = await self._read(_name(digest, owner, job), digest, size_bytes=size_bytes, owner=owner)
        return None if data is None else ContentReader.of_bytes(self._memory, data, digest, owner=owner)

    async def url(self, digest: str, *, owner: str = "", job: str = "") -> str:
        """Return a URL by which anybody can read the image for a while; "" if there is none."""
        own = _name(digest, owner, job)
        copies = await self._find(digest) if self._sign else ()
        # Another job's copy may be deleted earlier.
        name = max((copy.name for copy in copies), key=lambda name: name == own, default="")
        return self._sign(name) if self._sign and name else ""

    def holds(self, digest: str) -> bool:
        """Return whether the image may exist. This does not ask the object store; `renew` does."""
        copies = self._copies.get(digest)
        return copies is None or any(self._is_fresh(copy) for copy in copies.values())

    async def probe(self) -> None:
        """Write and remove an object, as a test of the object store."""
        await self._run(self._objects.probe)

    async def sweep(self) -> bool:
        """Delete copies that expired or exceed the budget. Return whether there are more objects to list first."""
        await self._local.sweep()
        due = self._refreshed_at is None or self.steady() - self._refreshed_at >= _REFRESH_S
        if due and not await self._list_page():
            return True
        await self._remove([copy for copy in self._all() if not self._is_fresh(copy)])
        await self._evict(0, "")
        return False

    async def _run(self, do: Callable[[], ResultT], *, owner: str = "") -> ResultT:
        """Run a call of the object store in a thread, in the owner's turn. Hide what only the operator may know."""
        if self._closed:
            raise unavailable("the storage is closed", cause="ESHUTDOWN")
        try:
            async with self._turns.turn(owner):
                work = asyncio.get_running_loop().run_in_executor(self._threads, do)
                return await asyncio.wait_for(work, _WAIT_S)
        except StorageUnavailable as error:
            raise unavailable("the object storage cannot be used", cause=error.metadata.get("cause", "EIO")) from error
        except TimeoutError:
            raise unavailable("the object storage does not answer", cause="ETIMEDOUT") from None

    async def _list_page(self) -> bool:
        """List some more objects, and return whether these were the last. A failure begins the listing again.

        What this process wrote or removed since the listing began stays as it is here.
        """
        listing, self._listing = self._listing, None
        if listing is None:
            self._removed.clear()
            listing = (self.steady(), await self._run(self._objects.objects), set())
        began, left, names = listing
        page = await self._run(lambda: list(itertools.islice(left, _PAGE)))
        now = self.steady()
        for found in page:
            names.add(found.name)
            if found.name not in self._removed and found.name not in self._copies.get(found.name[:64], {}):
                self._enter(self._listed(found, now))
        if len(page) == _PAGE:
            self._listing = listing
            return False
        for copy in list(self._all()):
            if copy.name not in names and copy.time < began:
                self._leave(copy)
        self._refreshed_at = began
        return True

    async def _look(self, digest: str) -> None:
        """List the copies of one image again: another gateway may have written or deleted some."""
        now = self.steady()
        listed = {found.name: found for found in await self._run(lambda: list(self._objects.objects(digest)))}
        for copy in list(self._copies.get(digest, {}).values()):
            if copy.name not in listed and not (copy.own and copy.time >= now):
                self._leave(copy)
        for name, found in listed.items():
            if name not in self._removed and name not in self._copies.get(digest, {}):
                self._enter(self._listed(found, now))

    async def _find(self, digest: str) -> list[_Copy]:
        """Return the copies of an image that have not expired."""
        if not any(map(self._is_fresh, self._copies.get(digest, {}).values())):
            await self._look(digest)
        return [copy for copy in self._copies.get(digest, {}).values() if self._is_fresh(copy)]

    async def _read_any(self, digest: str, copies: Sequence[_Copy], owner: str) -> bytes | None:
        """Return an image from one of its copies; None if all are gone. Raise DataLoss if the rest is damaged."""
        read: set[str] = set()
        while copies:
            for copy in sorted(copies, key=lambda copy: -copy.time):
                data = await self._read(copy.name, digest, size_bytes=copy.size_bytes, owner=owner)
                if data is not None:
                    return data
                read.add(copy.name)
            await self._look(digest)  # other gateways may have deleted these and written others
            found = await self._find(digest)
            copies = [copy for copy in found if copy.name not in read]
            if found and not copies:
                raise damaged(digest)
        return None

    async def _read(self, name: str, digest: str, *, size_bytes: int, owner: str) -> bytes | None:
        do = functools.partial(self._objects.read, name, digest=bytes.fromhex(digest), size_bytes=size_bytes)
        return await self._run(do, owner=owner)

    async def _put_local(self, digest: str, data: bytes, owner: str) -> bool:
        """Write an image to the local folder. A failure costs time, not the image."""
        try:
            await self._local.put(digest, data, owner=owner)
        except BottegaError as error:
            _log.warning("an image is not kept in the local folder", extra={"text": error.message})
            return False
        return True

    async def _evict(self, size_bytes: int, owner: str) -> None:
        """Remove the oldest copies of the owners with the most bytes until `size_bytes` more of `owner` fit."""
        excess = self.size_bytes + size_bytes - self.budget_bytes
        if excess <= 0 or self._refreshed_at is None:  # all owners have to be known
            return
        used: dict[str, int] = {owner: size_bytes}
        by_owner: dict[str, list[_Copy]] = {}
        settled = self.steady() - _SETTLED_S
        for copy in sorted(self._all(), key=lambda copy: -copy.time):
            used[copy.owner] = used.get(copy.owner, 0) + copy.size_bytes
            if copy.digest not in self.pins and (copy.own or copy.time < settled):
                by_owner.setdefault(copy.owner, []).append(copy)
        chosen: list[_Copy] = []
        while excess > 0 and by_owner:
            most = max(by_owner, key=lambda name: used[name])
            oldest = by_owner[most].pop()
            chosen.append(oldest)
            excess -= oldest.size_bytes
            used[most] -= oldest.size_bytes
            if not by_owner[most]:
                del by_owner[most]
        await self._remove(chosen)

    async def _remove(self, copies: Collection[_Copy]) -> None:
        """Delete copies. They are removed from the index first, so that nobody relies on them meanwhile."""
        if not copies:
            return
        names = [copy.name for copy in copies]
        known = [copy for copy in copies if self._leave(copy)]
        self._removed.update(names)
        try:
            await self._run(lambda: self._objects.remove(names))
        except BaseException:
            self._removed.difference_update(names)
            for copy in known:
                self._enter(copy)
            raise

    def _listed(self, found: StoredObject, now: float) -> _Copy:
        time = min(now, now - found.age_s + _DOUBT_S)
        return _Copy(name=found.name, size_bytes=found.size_bytes, time=time, own=False)

    def _is_fresh(self, copy: _Copy) -> bool:
        return copy.time + self._ttl_s > self.steady()

    def _all(self) -> Iterator[_Copy]:
        for copies in self._copies.values():
            yield from copies.values()

    def _enter(self, copy: _Copy) -> None:
        self._leave(copy)
        self._copies.setdefault(copy.digest, {})[copy.name] = copy
        self.size_bytes += copy.size_bytes

    def _leave(self, copy: _Copy) -> bool:
        copies = self._copies.get(copy.digest, {})
        known = copies.pop(copy.name, None)
        if known is None:
            return False
        self.size_bytes -= known.size_bytes
        if not copies:
            del self._copies[copy.digest]
        return True


_DIGEST = re.compile(r"[0-9a-f]{64}")


def _tag(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _name(digest: str, owner: str, job: str) -> str:
    return f"{digest}-{_tag(owner)}-{_tag(job)}"
