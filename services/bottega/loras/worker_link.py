"""Workers' links: they receive fetches and send LoRAs.

A worker on the same host gets the memory itself. A LoRA for another host is sent in pieces. The sending thread sends
other messages first, then the next piece of the oldest transfer.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from bottega import kinds
from bottega.addons.loras.wire import messages
from bottega.addons.loras.wire.canonical import CanonicalLora, parse
from bottega.addons.loras.wire.messages import LoraMessageKind
from bottega.caching import CacheLease, TieredCache
from bottega.errors import BottegaError, DataLoss, InternalError, NoSharedMemory, TooLarge
from bottega.rpc.links_config import LimitedLinksConfig
from bottega.rpc.status import job_error_to_json
from bottega.rpc.store_links import StoreLinks
from bottega.safetensors_header import LENGTH_BYTES, HeaderError, header_bytes
from bottega.transport import (
    Connection,
    Deadline,
    Incoming,
    Limits,
    Link,
    LinkHandler,
    LinkServerSettings,
    PieceSize,
    RateLimiter,
    SealedFile,
    kind_of,
    pack_number,
    read_number,
)

# 60 s: a worker that has not received a message by then is lost.
_SEND_S = 60.0
MAX_PIECE_BYTES = 4 << 20
# Waiting fetches of one worker, which runs some tens of requests with at most eight LoRAs each.
_MAX_WAITING = 512
# A smaller file is copied: that takes less time than mapping it, and a process may have at most 65,530 mappings.
_MIN_SHARED_BYTES = 64 << 10
# Workers' messages are short. The workers' own limits bound what they receive.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)


class LoraWorkerLink(LinkHandler):
    """The store's side of one worker's link.

    Args:
        connection: The link.
        cache: The LoRAs.
        bytes_per_s: Limit on the link's rate, also within a host; 0 means no limit.
    """

    def __init__(self, connection: Connection, *, cache: TieredCache, bytes_per_s: int) -> None:
        self._connection = connection
        self._cache = cache
        self._pace = RateLimiter(bytes_per_s, most_bytes=MAX_PIECE_BYTES)
        self._shares = bytes_per_s == 0
        # Used by the sending thread alone. The heads of all transfers have been sent; pieces of the first one follow.
        self._transfers: deque[LoraTransfer] = deque()
        self._waiting: set[int] = set()  # numbers of fetches whose LoRAs are being loaded
        self._waiting_lock = threading.Lock()

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a worker's fetch or cancellation."""
        layout = incoming.layout
        with incoming:
            views = connection.wait_all(incoming)
            match LoraMessageKind(kind_of(layout)):
                case LoraMessageKind.FETCH:
                    self._fetch(*messages.read_fetch(layout, views))
                case LoraMessageKind.CANCEL:
                    self._cancel(read_number(layout, views))
                case kind:
                    raise ValueError(f"a worker sends no {kind} message")

    def on_end(self, cause: BottegaError) -> None:
        """Return the leases of unfinished transfers."""
        while self._transfers:
            self._drop(self._transfers[0])

    @property
    def idle_s(self) -> float | None:
        """Return how long the link must be idle before the next piece is sent; None without a transfer."""
        return self._pace.wait_s if self._transfers else None

    def send_idle(self, link: Link) -> None:
        """Send the next piece of the oldest transfer."""
        first = self._transfers[0]
        self._advance(link, first, first.send_piece)

    def _fetch(self, number: int, digest: str) -> None:
        with self._waiting_lock:
            if number in self._waiting:
                raise ValueError(f"a worker sent two fetches with the number {number}")
            if len(self._waiting) >= _MAX_WAITING:
                raise ValueError(f"a worker may wait for at most {_MAX_WAITING} LoRAs")
            self._waiting.add(number)
        # The loading thread calls back, and posts the rest to the sending thread.
        self._cache.borrow(digest).add_done_callback(lambda loading: self._loaded(number, loading))

    def _cancel(self, number: int) -> None:
        """Stop a fetch whose LoRA has not been sent completely."""
        with self._waiting_lock:
            self._waiting.discard(number)
        self._connection.post(lambda _link: self._stop_sending(number))

    def _stop_sending(self, number: int) -> None:
        for transfer in [transfer for transfer in self._transfers if transfer.number == number]:
            self._drop(transfer)

    def _loaded(self, number: int, loading: Future[CacheLease]) -> None:
        """Post a loaded LoRA to the sending thread, or return its lease if the link has ended."""
        posted = self._connection.post(lambda link: self._hand_out(link, number, loading))
        if not posted and loading.exception() is None:
            self._cache.give_back(loading.result())

    def _hand_out(self, link: Link, number: int, loading: Future[CacheLease]) -> None:
        with self._waiting_lock:
            wanted = number in self._waiting
            self._waiting.discard(number)
        try:
            lease = loading.result(timeout=0)
        except BottegaError as error:
            if wanted:
                self._refuse(link, number, error)
            return
        if not wanted:
            self._cache.give_back(lease)
            return
        if self._shares and link.passes_files and lease.resident and lease.size_bytes >= _MIN_SHARED_BYTES:
            self._share(link, number, lease)
        else:
            self._send(link, number, lease)

    def _share(self, link: Link, number: int, lease: CacheLease) -> None:
        """Pass the memory itself, which the worker keeps without a lease."""
        file = SealedFile(descriptor=lease.descriptor, size_bytes=lease.size_bytes)
        try:
            self._connection.send_now(link, messages.whole_message(number, lease.times_until_now()), file=file)
        except (NoSharedMemory, TooLarge) as error:  # the link is intact
            self._refuse(link, number, error)
        finally:
            self._cache.give_back(lease)

    def _send(self, link: Link, number: int, lease: CacheLease) -> None:
        try:
            transfer = LoraTransfer(number, lease)
        except BottegaError as error:
            self._cache.give_back(lease)
            self._refuse(link, number, error)
            return
        self._transfers.append(transfer)
        self._advance(link, transfer, transfer.send_head)

    def _advance(self, link: Link, transfer: LoraTransfer, send_next: Callable[[Link, RateLimiter], None]) -> None:
        """Send a transfer's next message, and drop the transfer if it is finished or failed."""
        try:
            send_next(link, self._pace)
        except (NoSharedMemory, TooLarge, InternalError) as error:  # the link is intact
            self._drop(transfer)
            self._refuse(link, transfer.number, error)
        else:
            if transfer.done:
                self._drop(transfer)

    def _drop(self, transfer: LoraTransfer) -> None:
        self._transfers.remove(transfer)
        self._cache.give_back(transfer.lease)

    def _refuse(self, link: Link, number: int, error: BottegaError) -> None:
        self._connection.send_now(link, messages.refused_message(number, job_error_to_json(error)))


class LoraLinks(StoreLinks[LoraWorkerLink]):
    """The links of all workers. Raises ConfigError if an address cannot be bound."""

    def __init__(self, config: LimitedLinksConfig, *, cache: TieredCache) -> None:
        self._cache = cache
        self._bytes_per_s = config.bytes_per_s
        super().__init__(config, kind=kinds.LORAS, what="the LoRA store", settings=LinkServerSettings(limits=_LIMITS))

    def new_handler(self, connection: Connection) -> LoraWorkerLink:
        """Return the handler of one worker's link."""
        return LoraWorkerLink(connection, cache=self._cache, bytes_per_s=self._bytes_per_s)


class LoraTransfer:
    """The response to one fetch, in messages.

    Raises DataLoss for a damaged file. Methods raise InternalError if the file has become shorter, and the errors of
    sending.

    Args:
        number: Number of the fetch.
        lease: The LoRA in the cache.
    """

    def __init__(self, number: int, lease: CacheLease) -> None:
        self.number = number
        self.lease = lease
        self._lora = _header(lease)
        self._sent_bytes = 0
        self._piece_size = PieceSize(slots=messages.SLOTS, most_bytes=MAX_PIECE_BYTES)

    @property
    def done(self) -> bool:
        """Whether all pieces have been sent. Call it after `send_head`."""
        return self._sent_bytes == self._lora.unet_bytes

    def send_head(self, link: Link, pace: RateLimiter) -> None:
        """Send the header and the text encoders' section."""
        lora = self._lora
        layout = messages.lora_layout(lora)
        with link.start_message(layout, Deadline.after(_SEND_S)) as outgoing:
            outgoing.views[0][:] = pack_number(self.number)
            outgoing.views[messages.UNET_BYTES][:] = pack_number(lora.unet_bytes)
            outgoing.views[messages.TIMES][:] = messages.pack_times(self.lease.times_until_now())
            self._fill(outgoing.views[messages.HEADER], 0, lora.header_bytes)
            self._fill(outgoing.views[messages.TEXT], lora.header_bytes, lora.text_bytes)
            outgoing.finish()
        pace.spend(layout.size_bytes)

    def send_piece(self, link: Link, pace: RateLimiter) -> None:
        """Send the next piece of the UNet's section, of a size that the link's speed determines."""
        lora = self._lora
        size_bytes = min(self._piece_size.next(), pace.most_bytes, lora.unet_bytes - self._sent_bytes)
        with link.start_message(messages.piece_layout(size_bytes), Deadline.after(_SEND_S)) as outgoing:
            outgoing.views[0][:] = pack_number(self.number)
            place = lora.header_bytes + lora.text_bytes + self._sent_bytes
            self._fill(outgoing.views[messages.PIECE], place, size_bytes)
            outgoing.finish()
        self._sent_bytes += size_bytes
        pace.spend(size_bytes)

    def _fill(self, view: memoryview, place: int, size_bytes: int) -> None:
        """Read bytes of the file into a tensor of a slot."""
        if not size_bytes:
            view[:] = bytes(len(view))
        done = 0
        while done < size_bytes:
            got = os.preadv(self.lease.descriptor, [view[done:size_bytes]], place + done)
            if not got:
                raise InternalError("the LoRA's file has become shorter while it was sent")
            done += got


def _header(lease: CacheLease) -> CanonicalLora:
    try:
        size = header_bytes(os.pread(lease.descriptor, LENGTH_BYTES, 0))
        return parse(os.pread(lease.descriptor, size, 0), file_bytes=lease.size_bytes)
    except (BottegaError, HeaderError) as error:
        raise DataLoss(f"the LoRA's file is damaged: {error}") from error
