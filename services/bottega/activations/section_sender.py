"""Sends the sections that a worker requested, as shared memory or in pieces.

A worker of this host gets the memory itself. Others get bytes: the sending thread first sends all other messages, then
a piece of the next section. Edits take turns, and each edit's sections are sent in the order of its requests. Only a
few sections of a worker are loaded at once; further requests wait.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from bottega.activations.store.store import ActivationStore
from bottega.addons.edits.wire import messages
from bottega.addons.edits.wire.messages import CHUNK_BYTES, WORKER_LIMITS
from bottega.addons.edits.wire.pieces import SectionPiece, SectionPieces, send_chunk
from bottega.addons.edits.wire.section import SectionLayout
from bottega.caching import CacheLease
from bottega.errors import BottegaError, DataLoss, InternalError, InvalidRequest, NoSharedMemory, TooLarge
from bottega.rpc.status import job_error_to_json
from bottega.transport import Connection, Link, PieceSize, RateLimiter, SealedFile
from bottega.v1.activations_pb2 import SectionRequest
from bottega.v1.trace_pb2 import StoreTimes

# Requests of one worker, which has some tens of edits that each request the sections of coming steps.
_MOST_WAITING = 4096
# Sections of one worker that are loaded or being sent; each occupies memory.
_MOST_AT_ONCE = 16
# Smaller files are sent: that takes less time than mapping, and the number of mappings is limited (65,530).
_LEAST_SHARED_BYTES = 64 << 10


class SectionSender:
    """Sends sections over one link. `bytes_per_s` also limits links within a host; 0 is no limit."""

    def __init__(self, connection: Connection, *, store: ActivationStore, bytes_per_s: int) -> None:
        self._connection = connection
        self._store = store
        self._pace = RateLimiter(bytes_per_s, most_bytes=CHUNK_BYTES)
        self._piece_size = PieceSize(slots=WORKER_LIMITS.slots, most_bytes=CHUNK_BYTES)
        self._shares = bytes_per_s == 0
        self._orders = itertools.count()
        # Used by the sending thread only.
        self._sendings = TurnQueue[SectionTransfer]()
        # Under the lock: requests that wait, the numbers of all open requests, and how many are being served.
        self._lock = threading.Lock()
        self._queued = TurnQueue[SectionRequested]()
        self._wanted: set[int] = set()
        self._under_way = 0
        self._ended = False

    @property
    def idle_s(self) -> float | None:
        """Seconds of silence before the next piece may be sent; None if there is none."""
        return self._pace.wait_s if self._sendings else None

    def fetch(self, number: int, request: SectionRequest) -> None:
        """Request a section, from the receiving thread. Raise ValueError if the worker has too many requests."""
        requested = SectionRequested(
            number=number,
            digest=request.digest,
            tensors=tuple(request.tensors),
            edit=request.edit,
            order=next(self._orders),
        )
        with self._lock:
            if number in self._wanted:
                raise ValueError(f"a worker uses request number {number} twice")
            if len(self._wanted) >= _MOST_WAITING:
                raise ValueError(f"a worker may have at most {_MOST_WAITING} open requests for sections")
            self._wanted.add(number)
            self._queued.add(requested)
        self._begin()

    def cancel(self, number: int) -> None:
        """Cancel a request, if it is still open."""
        with self._lock:
            self._wanted.discard(number)
            queued = self._queued.find(lambda item: item.number == number)
            if queued is not None:
                self._queued.remove(queued)
                return
        self._connection.post(lambda _link: self._stop_sending(number))

    def send_piece(self, link: Link) -> None:
        """Send the next piece of the next section, from the sending thread."""
        sending = self._sendings.first()
        most_bytes = min(self._piece_size.next(), self._pace.most_bytes)
        try:
            sent_bytes = sending.send_piece(link, most_bytes)
        except (NoSharedMemory, TooLarge, InternalError) as error:  # The link can be used further.
            self._drop(sending)
            self._refuse(link, sending.number, error)
            return
        self._pace.spend(sent_bytes)
        self._sendings.spend(sent_bytes, turn_bytes=most_bytes)
        if sending.done:
            self._drop(sending)

    def end(self) -> None:
        """Release all sections after the link has ended."""
        with self._lock:
            self._ended = True
            self._queued = TurnQueue[SectionRequested]()
        for sending in list(self._sendings):
            self._drop(sending)

    def _stop_sending(self, number: int) -> None:
        for sending in [each for each in self._sendings if each.number == number]:
            self._drop(sending)

    def _begin(self) -> None:
        """Load the next sections, as many as allowed."""
        while (requested := self._next_queued()) is not None:
            self._load(requested)

    def _next_queued(self) -> SectionRequested | None:
        with self._lock:
            if not self._queued or self._under_way >= _MOST_AT_ONCE or self._ended:
                return None
            self._under_way += 1
            return self._queued.pop()

    def _load(self, requested: SectionRequested) -> None:
        requested = replace(requested, waited_s=time.monotonic() - requested.requested_s)
        # The loading thread calls this; the sending thread sends.
        self._store.fetch(requested.digest).add_done_callback(lambda asked: self._loaded(requested, asked))

    def _loaded(self, requested: SectionRequested, asked: Future[CacheLease]) -> None:
        """Hand out a loaded section, or release it if the link has ended."""
        if not self._connection.post(lambda link: self._hand_out(link, requested, asked)):
            with self._lock:
                self._ended = True
            if asked.exception() is None:
                self._store.give_back(asked.result())

    def _hand_out(self, link: Link, requested: SectionRequested, asked: Future[CacheLease]) -> None:
        with self._lock:
            wanted = requested.number in self._wanted
        try:
            lease = asked.result(timeout=0)
        except BottegaError as error:
            self._end_one()
            if wanted:
                self._refuse(link, requested.number, error)
            return
        if not wanted:
            self._give_back(lease)
        elif self._shares and link.passes_files and lease.resident and lease.size_bytes >= _LEAST_SHARED_BYTES:
            self._share(link, requested, lease)
        else:
            self._send(link, requested, lease)

    def _share(self, link: Link, requested: SectionRequested, lease: CacheLease) -> None:
        """Pass the file descriptor to the worker, which then needs no lease."""
        file = SealedFile(descriptor=lease.descriptor, size_bytes=lease.size_bytes)
        self._forget(requested.number)
        try:
            whole = messages.whole_message(requested.number, requested.times(lease))
            self._connection.send_now(link, whole, file=file)
        except (NoSharedMemory, TooLarge) as error:  # The link can be used further.
            self._refuse(link, requested.number, error)
        finally:
            self._give_back(lease)

    def _send(self, link: Link, requested: SectionRequested, lease: CacheLease) -> None:
        layout = self._store.layout_of(requested.digest)
        try:
            if layout is None:
                raise DataLoss("the section is gone")
            self._sendings.add(SectionTransfer(requested, lease, layout))
        except (DataLoss, InvalidRequest) as error:
            self._give_back(lease)
            self._refuse(link, requested.number, error)

    def _drop(self, sending: SectionTransfer) -> None:
        """End a transfer, finished or not."""
        self._sendings.remove(sending)
        self._forget(sending.number)
        self._give_back(sending.lease)

    def _give_back(self, lease: CacheLease) -> None:
        self._store.give_back(lease)
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
        self._connection.send_now(link, messages.refused_message(number, job_error_to_json(error)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionRequested:
    """A worker's request for a section."""

    number: int
    """The worker's number of the request."""
    digest: str
    tensors: tuple[int, ...]
    """Places of the requested tensors in the section; empty for all."""
    edit: int
    """See `SectionRequest`."""
    order: int
    """Place of the request among all of the worker."""
    requested_s: float = field(default_factory=time.monotonic)
    """Time of arrival, on the monotonic clock."""
    waited_s: float = 0.0
    """Seconds in the queue."""

    def times(self, lease: CacheLease) -> StoreTimes:
        """Return the store's times for the request until now, when the lease is sent."""
        times = lease.times_until_now()
        times.wait_s += self.waited_s
        return times


class SectionTransfer:
    """A lease that is being sent. Raises InvalidRequest if tensors are requested that the section does not have."""

    def __init__(self, requested: SectionRequested, lease: CacheLease, layout: SectionLayout) -> None:
        self.number = requested.number
        self.edit = requested.edit
        self.order = requested.order
        self.lease = lease
        self._requested = requested
        self._begun = False
        self._layout = layout
        try:
            self._pieces = SectionPieces(layout, requested.tensors or None)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    @property
    def done(self) -> bool:
        """Whether everything requested was sent."""
        return self._pieces.done

    def send_piece(self, link: Link, most_bytes: int) -> int:
        """Send the next bytes, up to `most_bytes`, and return how many were sent.

        Raise InternalError if the file has become shorter, or the error of the link.
        """
        times = None if self._begun else self._requested.times(self.lease)
        self._begun = True
        return send_chunk(link, self.number, self._pieces.take(most_bytes), self._fill, times=times)

    def _fill(self, piece: SectionPiece, view: memoryview) -> None:
        """Read bytes of the file into a tensor of a slot."""
        place, done = self._layout.offsets[piece.tensor] + piece.start, 0
        while done < len(view):
            got = os.preadv(self.lease.descriptor, [view[done:]], place + done)
            if not got:
                raise InternalError("a section's file has become shorter while it was sent")
            done += got


class Turn(Protocol):
    """An item of the queue, with the edit that it belongs to and its place among all items."""

    @property
    def edit(self) -> int: ...

    @property
    def order(self) -> int: ...


TurnT = TypeVar("TurnT", bound=Turn)


class TurnQueue(Generic[TurnT]):
    """A queue in which edits take turns. Not thread-safe."""

    def __init__(self) -> None:
        self._spent_bytes = 0  # Bytes sent in the current turn.
        # By edit, the current one first. Lists are short: an edit requests the sections of a few steps.
        self._edits: OrderedDict[int, list[TurnT]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._edits)

    def __iter__(self) -> Iterator[TurnT]:
        for items in self._edits.values():
            yield from items

    def add(self, item: TurnT) -> None:
        """Add an item in order, possibly before later ones of the same edit."""
        items = self._edits.setdefault(item.edit, [])
        place = len(items)
        while place and items[place - 1].order > item.order:
            place -= 1
        items.insert(place, item)

    def first(self) -> TurnT:
        """Return the first item of the current edit. Raise IndexError if the queue is empty."""
        for items in self._edits.values():
            return items[0]
        raise IndexError("the queue is empty")

    def spend(self, size_bytes: int, *, turn_bytes: int) -> None:
        """Count bytes sent for the first item; after `turn_bytes` the next edit has its turn."""
        self._spent_bytes += size_bytes
        if self._spent_bytes >= turn_bytes:
            self._pass_on()

    def remove(self, item: TurnT) -> None:
        """Remove an item. Raise ValueError if it is not in the queue."""
        items = self._edits.get(item.edit, [])
        items.remove(item)
        if not items:
            is_first = next(iter(self._edits)) == item.edit
            del self._edits[item.edit]
            if is_first:
                self._spent_bytes = 0

    def pop(self) -> TurnT:
        """Remove and return the first item, and pass the turn on. Raise IndexError if the queue is empty."""
        item = self.first()
        self._pass_on()
        self.remove(item)
        return item

    def find(self, wanted: Callable[[TurnT], bool]) -> TurnT | None:
        """Return the first item that satisfies `wanted`, or None."""
        return next((item for item in self if wanted(item)), None)

    def _pass_on(self) -> None:
        self._spent_bytes = 0
        if self._edits:
            self._edits.move_to_end(next(iter(self._edits)))
