"""The connection of a worker's engine to one LoRA store: fetches LoRAs, and reconnects after a loss.

A LoRA that arrives as a whole file is hashed in a thread of its own, so that a prompt that waits for one LoRA does not
wait for the hash of another. The connection identifies LoRAs by number, and does not keep them.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from bottega import kinds
from bottega.addons.interface.store_link import StoreLink
from bottega.addons.loras.wire import messages
from bottega.addons.loras.wire.canonical import MAX_FILE_BYTES
from bottega.addons.loras.wire.messages import DENOISER_BYTES, HEADER, PIECE, TEXT, TIMES, LoraMessageKind
from bottega.addons.loras.worker.download import LoraDownload
from bottega.errors import BottegaError, DataLoss, InternalError
from bottega.rpc.status import from_job_error, job_error_from_json
from bottega.transport import (
    Connection,
    Incoming,
    Layout,
    Limits,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    kind_of,
    number_message,
    read_number,
)
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.trace_pb2 import StoreTimes

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLinkSettings(LinkClientSettings):
    """The settings of a connection whose slots grow to the largest message: a header or a piece.

    A whole LoRA is sent as a file beside its message.
    """

    limits: Limits = field(default_factory=lambda: Limits(slots=messages.SLOTS, slot_bytes=MAX_FILE_BYTES + (1 << 20)))


class LoraStoreLink(StoreLink):
    """A connection to one store. It requests the LoRAs of `fetch` until they have arrived. Any thread may call it.

    Args:
        on_progress: Called when more of a LoRA has arrived.
        on_refused: Called with a LoRA that the store does not send, and the reason.
        on_lost: Called when the store is lost or cannot be reached. It may move pending downloads to other stores.
    """

    def __init__(
        self,
        store: ServiceAddress,
        *,
        offers: OfferSource,
        settings: LoraLinkSettings,
        counters: LinkCounters,
        on_progress: Callable[[], None],
        on_refused: Callable[[LoraStoreLink, LoraDownload, BottegaError], None],
        on_lost: Callable[[LoraStoreLink, BottegaError], None],
    ) -> None:
        self._on_progress = on_progress
        self._on_refused = on_refused
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._wanted: dict[int, LoraDownload] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._checks = ThreadPoolExecutor(1, thread_name_prefix=f"checks-{store.name}")
        super().__init__(
            store, kind=kinds.LORAS, title="a LoRA store", offers=offers, settings=settings, counters=counters
        )
        self.start()

    @property
    def wants_link(self) -> bool:
        """Whether any LoRA is still to be fetched, so that the connection should be open."""
        return bool(self._wanted)

    def fetch(self, download: LoraDownload) -> None:
        """Request a LoRA, in the background."""
        with self._lock:
            number = next(self._numbers)
            self._wanted[number] = download
            if self._connection is not None:
                self._ask(self._connection, number, download)
        self._client.wake()

    def give_up(self, download: LoraDownload) -> None:
        """Drop a download that another store sends or that no job needs. Parts that arrive later are ignored."""
        with self._lock:
            for number in [number for number, wanted in self._wanted.items() if wanted is download]:
                del self._wanted[number]
                if self._connection is not None:
                    self._connection.send(number_message(LoraMessageKind.CANCEL, number))

    def wanted(self) -> list[LoraDownload]:
        """Return the pending downloads."""
        with self._lock:
            return list(self._wanted.values())

    def close(self) -> None:
        with self._lock:
            self._closed = True
        super().close()
        self._checks.shutdown(wait=False)  # checks that wait still run, because a job may need them

    def on_open(self, connection: Connection) -> None:
        """Request all pending downloads over the new connection."""
        with self._lock:
            super().on_open(connection)
            for number, download in self._wanted.items():
                self._ask(connection, number, download)

    def on_end(self, cause: BottegaError) -> None:
        """Report the loss. Pending downloads are requested again, over a new connection or from another store."""
        with self._lock:
            super().on_end(cause)
        for download in self.wanted():
            download.restart()
        self._on_lost(self, cause)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a message. The size of a header or a piece is checked before its bytes are received."""
        layout = incoming.layout
        with incoming:
            match LoraMessageKind(kind_of(layout)):
                case LoraMessageKind.LORA:
                    messages.check_lora(layout, max_bytes=MAX_FILE_BYTES)
                    self._take_head(layout, connection.wait_all(incoming))
                case LoraMessageKind.WHOLE:
                    number, times = messages.read_whole(layout, connection.wait_all(incoming))
                    self._take_whole(number, times, incoming.file)
                case LoraMessageKind.PIECE:
                    messages.check_piece(layout, max_bytes=MAX_FILE_BYTES)
                    views = connection.wait_all(incoming)
                    self._take(read_number(layout, views), lambda download: download.take_piece(views[PIECE]))
                case LoraMessageKind.REFUSED:
                    self._take_refusal(*messages.read_refusal(layout, connection.wait_all(incoming)))
                case kind:
                    raise ValueError(f"a LoRA store must not send a {kind} message")

    def _ask(self, connection: Connection, number: int, download: LoraDownload) -> None:
        download.requested_s = time.monotonic()
        connection.send(messages.fetch_message(number, download.ref.digest))

    def _take_head(self, layout: Layout, views: list[memoryview]) -> None:
        times = messages.read_times(views[TIMES])
        denoiser_bytes = messages.read_denoiser_bytes(views[DENOISER_BYTES], max_bytes=MAX_FILE_BYTES)

        def take(download: LoraDownload) -> None:
            download.note_answer(self.store.name, times)
            download.take_head(bytes(views[HEADER]), views[TEXT], denoiser_bytes)

        self._take(read_number(layout, views), take)

    def _take(self, number: int, take: Callable[[LoraDownload], None]) -> None:
        """Pass a part of a LoRA to its download. Ignore it if the download was given up."""
        download = self._wanted.get(number)
        if download is None:
            return
        knew_text = download.text_ready
        try:
            take(download)
        except DataLoss as error:
            self._refuse(number, error)
            return
        if download.ready:
            with self._lock:
                self._wanted.pop(number, None)
        if download.ready or not knew_text:
            self._on_progress()

    def _take_whole(self, number: int, times: StoreTimes, file: memoryview | None) -> None:
        """Pass a whole LoRA to its download, which needs the connection no more, and let its hash be checked."""
        if file is None:
            raise ValueError("a whole LoRA arrived without its file")
        download = self._wanted.get(number)
        if download is None:
            return
        download.note_answer(self.store.name, times)
        try:
            download.take_whole(file)
        except DataLoss as error:
            self._refuse(number, error)
            return
        with self._lock:
            self._wanted.pop(number, None)
            if not self._closed:
                self._checks.submit(self._check, download)
        self._on_progress()

    def _check(self, download: LoraDownload) -> None:
        """Check a whole LoRA, in a thread of its own."""
        if download.given_up:
            return
        try:
            download.check()
        except DataLoss as error:
            self._on_refused(self, download, error)
        except Exception:  # noqa: BLE001 - a thread that waits must get the error
            _log.exception("a LoRA could not be checked, and its requests fail", extra={"lora": download.ref.name})
            self._on_refused(self, download, InternalError("the worker could not check the LoRA"))
        else:
            self._on_progress()

    def _take_refusal(self, number: int, packed: bytes) -> None:
        refusal = job_error_from_json(packed)
        if (download := self._wanted.get(number)) is not None:
            # The store knows the digest only; people know the name.
            refusal.message = f"LoRA {download.ref.name}: {refusal.message}"
            refusal.metadata["loras"] = download.ref.name
        self._refuse(number, from_job_error(refusal))

    def _refuse(self, number: int, error: BottegaError) -> None:
        with self._lock:
            download = self._wanted.pop(number, None)
        if download is not None:
            self._on_refused(self, download, error)
