"""Tensor links over which a store sends files that workers request, as shared memory or in pieces.

A worker on the same host gets the memory itself. Others get bytes: the sending thread first sends all other messages,
then a piece of the next file. The owners of requests, such as edits, take turns, and the files of each owner are sent
in the order of its requests. Only some files for a worker are loaded at once; further requests wait.
"""

from __future__ import annotations

import abc
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from bottega.caching.tiers import CacheLease
from bottega.errors import BottegaError, InternalError, NoSharedMemory, TooLarge
from bottega.rpc.status import job_error_to_json
from bottega.rpc.store_server import StoreLinkHandler
from bottega.transport import Connection, Link, PieceSize, RateLimiter, SealedFile, WholeMessage
from bottega.v1.trace_pb2 import StoreTimes

# Bytes below which a file is sent rather than shared: that is faster than mapping, and mappings are limited (65,530).
_LEAST_SHARED_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class FileLimits:
    """Limits on what a store sends to one worker."""

    piece_bytes: int
    """Upper bound on the bytes of a piece."""
    slots: int
    """Number of messages that the worker's receive buffer holds."""
    most_open: int
    """Upper bound on the requests that are not answered completely."""
    most_at_once: int
    """Upper bound on the files that are loaded or being sent; each occupies memory."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FileRequest:
    """A worker's request for a file."""

    number: int
    """Number with which the worker identifies the request."""
    digest: str
    owner: int = 0
    """ID of the request's owner. An owner's requests are answered in order; owners take turns."""
    order: int = 0
    """Index of the request among all requests of the worker."""
    requested_s: float = field(default_factory=time.monotonic)
    """Time of arrival, on the monotonic clock."""
    waited_s: float = 0.0
    """Seconds that it waited in the queue."""

    def times(self, lease: CacheLease) -> StoreTimes:
        """Return the times that the store took for the request until now, when the lease is sent."""
        times = lease.times_until_now()
        times.wait_s += self.waited_s
        return times


RequestT = TypeVar("RequestT", bound=FileRequest)


class FileTransfer(abc.ABC):
    """A file that is being sent. Sending raises InternalError if the file was truncated, and errors of the link."""

    def __init__(self, request: FileRequest, lease: CacheLease) -> None:
        self.number = request.number
        self.owner = request.owner
        self.order = request.order
        self.lease = lease

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether all pieces were sent."""

    def send_head(self, link: Link) -> int:
        """Send what does not wait for the owner's turn, and return its bytes. Sends nothing by default."""
        return 0

    @abc.abstractmethod
    def send_piece(self, link: Link, max_bytes: int) -> int:
        """Send the next bytes, up to `max_bytes`, and return how many were sent."""

    def _fill(self, view: memoryview, place: int) -> None:
        """Read bytes of the file, starting at `place`, into a send buffer."""
        done = 0
        while done < len(view):
            got = os.preadv(self.lease.descriptor, [view[done:]], place + done)
            if not got:
                raise InternalError("the file was truncated while it was sent")
            done += got


class FileLinkHandler(StoreLinkHandler, Generic[RequestT]):
    """A store's side of the link to one worker.

    Args:
        what: Plural noun for the files in error messages, such as "sections".
        bytes_per_s: Upper bound on the send rate, also within a host; 0 means none. Files are shared as memory only
            then.
    """

    def __init__(self, connection: Connection, *, what: str, bytes_per_s: int, limits: FileLimits) -> None:
        super().__init__(connection)
        self._what = what
        self._limits = limits
        self._pace = RateLimiter(bytes_per_s, max_bytes=limits.piece_bytes)
        self._piece_size = PieceSize(slots=limits.slots, max_bytes=limits.piece_bytes)
        self._shares = bytes_per_s == 0
        self._orders = itertools.count()
        # Used by the sending thread only. The heads of these were sent.
        self._transfers = TurnQueue[FileTransfer]()
        # Under the lock: requests that wait, the numbers of all open requests, and how many are being served.
        self._lock = threading.Lock()
        self._queued = TurnQueue[RequestT]()
        self._wanted: set[int] = set()
        self._under_way = 0
        self._ended = False

    @property
    def idle_s(self) -> float | None:
        """Seconds without other messages after which the next piece may be sent. None if there is no piece."""
        return self._pace.wait_s if self._transfers else None

    def send_idle(self, link: Link) -> None:
        """Send the next piece of the next file."""
        transfer = self._transfers.first()
        max_bytes = min(self._piece_size.next(), self._pace.max_bytes)

        def send() -> int:
            sent_bytes = transfer.send_piece(link, max_bytes)
            self._transfers.spend(sent_bytes, turn_bytes=max_bytes)
            return sent_bytes

        self._advance(link, transfer, send)

    def on_end(self, cause: BottegaError) -> None:
        """Release all files."""
        with self._lock:
            self._ended = True
            self._queued = TurnQueue[RequestT]()
        for transfer in list(self._transfers):
            self._drop(transfer)

    @abc.abstractmethod
    def _borrow(self, request: RequestT) -> Future[CacheLease]:
        """Return a future lease of the requested file."""

    @abc.abstractmethod
    def _return(self, lease: CacheLease) -> None:
        """Give a lease back."""

    @abc.abstractmethod
    def _transfer(self, request: RequestT, lease: CacheLease) -> FileTransfer:
        """Return a transfer of the file in pieces. Raises BottegaError if the file cannot be sent."""

    @abc.abstractmethod
    def _whole_message(self, number: int, times: StoreTimes) -> WholeMessage:
        """Return the message with which the file is shared as memory."""

    @abc.abstractmethod
    def _refused_message(self, number: int, error: bytes) -> WholeMessage:
        """Return the message that refuses a request. `error` is a JobError as JSON."""

    def _fetch(self, request: RequestT) -> None:
        """Queue a request. Called by the receiving thread. Raises ValueError if the worker has too many."""
        with self._lock:
            if request.number in self._wanted:
                raise ValueError(f"a worker used request number {request.number} twice")
            if len(self._wanted) >= self._limits.most_open:
                raise ValueError(f"a worker may have at most {self._limits.most_open} open requests for {self._what}")
            self._wanted.add(request.number)
            self._queued.add(replace(request, order=next(self._orders)))
        self._begin()

    def _cancel(self, number: int) -> None:
        """Cancel a request if it is not answered completely."""
        with self._lock:
            self._wanted.discard(number)
            queued = self._queued.find(lambda request: request.number == number)
            if queued is not None:
                self._queued.remove(queued)
                return
        self._connection.post(lambda _link: self._stop_sending(number))

    def _stop_sending(self, number: int) -> None:
        for transfer in [transfer for transfer in self._transfers if transfer.number == number]:
            self._drop(transfer)

    def _begin(self) -> None:
        """Load the next files, as many as the limits allow."""
        while (request := self._next_queued()) is not None:
            self._load(request)

    def _next_queued(self) -> RequestT | None:
        with self._lock:
            if not self._queued or self._under_way >= self._limits.most_at_once or self._ended:
                return None
            self._under_way += 1
            return self._queued.pop()

    def _load(self, request: RequestT) -> None:
        waiting = replace(request, waited_s=time.monotonic() - request.requested_s)
        # The loading thread calls this; the sending thread sends.
        self._borrow(waiting).add_done_callback(lambda loading: self._loaded(waiting, loading))

    def _loaded(self, request: RequestT, loading: Future[CacheLease]) -> None:
        """Send a loaded file, or release it if the link has ended."""
        if not self._connection.post(lambda link: self._hand_out(link, request, loading)):
            with self._lock:
                self._ended = True
            if loading.exception() is None:
                self._return(loading.result())

    def _hand_out(self, link: Link, request: RequestT, loading: Future[CacheLease]) -> None:
        with self._lock:
            wanted = request.number in self._wanted
        try:
            lease = loading.result(timeout=0)
        except BottegaError as error:
            self._end_one()
            if wanted:
                self._refuse(link, request.number, error)
            return
        if not wanted:
            self._give_back(lease)
        elif self._shares and link.passes_files and lease.resident and lease.size_bytes >= _LEAST_SHARED_BYTES:
            self._share(link, request, lease)
        else:
            self._send_file(link, request, lease)

    def _share(self, link: Link, request: RequestT, lease: CacheLease) -> None:
        """Pass the file descriptor to the worker. The lease is not needed after that."""
        file = SealedFile(descriptor=lease.descriptor, size_bytes=lease.size_bytes)
        self._forget(request.number)
        try:
            whole = self._whole_message(request.number, request.times(lease))
            self._connection.send_now(link, whole, file=file)
        except (NoSharedMemory, TooLarge) as error:  # The link can be used further.
            self._refuse(link, request.number, error)
        finally:
            self._give_back(lease)

    def _send_file(self, link: Link, request: RequestT, lease: CacheLease) -> None:
        try:
            transfer = self._transfer(request, lease)
        except BottegaError as error:
            self._give_back(lease)
            self._refuse(link, request.number, error)
            return
        self._transfers.add(transfer)
        self._advance(link, transfer, lambda: transfer.send_head(link))

    def _advance(self, link: Link, transfer: FileTransfer, send: Callable[[], int]) -> None:
        """Send a part of a file with `send`, which returns its bytes. Drop the transfer at its end or on failure."""
        try:
            self._pace.spend(send())
        except (NoSharedMemory, TooLarge, InternalError) as error:  # The link can be used further.
            self._drop(transfer)
            self._refuse(link, transfer.number, error)
        else:
            if transfer.done:
                self._drop(transfer)

    def _drop(self, transfer: FileTransfer) -> None:
        """End a transfer, finished or not."""
        self._transfers.remove(transfer)
        self._forget(transfer.number)
        self._give_back(transfer.lease)

    def _give_back(self, lease: CacheLease) -> None:
        self._return(lease)
        self._end_one()

    def _end_one(self) -> None:
        with self._lock:
            self._under_way -= 1
        self._begin()

    def _forget(self, number: int) -> None:
        with self._lock:
            self._wanted.discard(number)

    def _refuse(self, link: Link, number: int, error: BottegaError) -> None:
        self._forget(number)
        self._connection.send_now(link, self._refused_message(number, job_error_to_json(error)))


class Turn(Protocol):
    """An item of a TurnQueue, with its owner and its position among all items."""

    @property
    def owner(self) -> int: ...

    @property
    def order(self) -> int: ...


TurnT = TypeVar("TurnT", bound=Turn)


class TurnQueue(Generic[TurnT]):
    """A queue that serves its owners in turn. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._spent_bytes = 0  # Bytes sent in the current turn.
        # By owner, the current one first. Lists are short: an edit requests the sections of a few steps.
        self._owners: OrderedDict[int, list[TurnT]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._owners)

    def __iter__(self) -> Iterator[TurnT]:
        for items in self._owners.values():
            yield from items

    def add(self, item: TurnT) -> None:
        """Add an item. It is sorted by `order` among the items of its owner."""
        items = self._owners.setdefault(item.owner, [])
        place = len(items)
        while place and items[place - 1].order > item.order:
            place -= 1
        items.insert(place, item)

    def first(self) -> TurnT:
        """Return the first item of the current owner. Raise IndexError if the queue is empty."""
        for items in self._owners.values():
            return items[0]
        raise IndexError("the queue is empty")

    def spend(self, size_bytes: int, *, turn_bytes: int) -> None:
        """Count bytes that were sent for the first item. After `turn_bytes`, the next owner has its turn."""
        self._spent_bytes += size_bytes
        if self._spent_bytes >= turn_bytes:
            self._pass_on()

    def remove(self, item: TurnT) -> None:
        """Remove an item. Raise ValueError if it is not in the queue."""
        items = self._owners.get(item.owner, [])
        items.remove(item)
        if not items:
            is_first = next(iter(self._owners)) == item.owner
            del self._owners[item.owner]
            if is_first:
                self._spent_bytes = 0

    def pop(self) -> TurnT:
        """Remove and return the first item, and pass the turn on. Raise IndexError if the queue is empty."""
        item = self.first()
        self._pass_on()
        self.remove(item)
        return item

    def find(self, wanted: Callable[[TurnT], bool]) -> TurnT | None:
        """Return the first item for which `wanted` returns True, or None."""
        return next((item for item in self if wanted(item)), None)

    def _pass_on(self) -> None:
        self._spent_bytes = 0
        if self._owners:
            self._owners.move_to_end(next(iter(self._owners)))
