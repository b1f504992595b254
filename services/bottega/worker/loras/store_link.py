"""One LoRA store as a worker's engine sees it: fetches what is wanted, and opens the link again when it is lost.

What comes whole is checked in a thread of its own, so that text that a prompt waits for waits for no other LoRA's hash.
LoRAs are known by number here, and none is kept.
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
from bottega.errors import BottegaError, DataLoss, InternalError
from bottega.lora import messages
from bottega.lora.canonical import MAX_FILE_BYTES
from bottega.lora.messages import HEADER, PIECE, TEXT, TIMES, UNET_BYTES, LoraMessageKind
from bottega.rpc.status import from_job_error, job_error_from_json
from bottega.transport import (
    Connection,
    Incoming,
    Layout,
    Limits,
    LinkClient,
    LinkClientHandler,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    kind_of,
    number_message,
    read_number,
)
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.trace_pb2 import StoreTimes
from bottega.worker.loras.download import LoraDownload

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLinkSettings(LinkClientSettings):
    """Takes in slots that grow to the largest message that came: a head, or a piece. A whole LoRA is a file beside its
    message."""

    limits: Limits = field(default_factory=lambda: Limits(slots=messages.SLOTS, slot_bytes=MAX_FILE_BYTES + (1 << 20)))


class StoreLink(LinkClientHandler):
    """`fetch` what is wanted; it is asked for as long as the link takes. Any thread may call it.

    on_progress: called when more of something is here. on_refused: called with what the store will not send, and why.
    on_lost: called with all that was asked for when the store was lost, or could not be reached; what it takes out of
    the mapping is no longer wanted here.
    """

    def __init__(
        self,
        store: ServiceAddress,
        *,
        offers: OfferSource,
        settings: LoraLinkSettings,
        counters: LinkCounters,
        on_progress: Callable[[], None],
        on_refused: Callable[[StoreLink, LoraDownload, BottegaError], None],
        on_lost: Callable[[StoreLink, BottegaError], None],
    ) -> None:
        self.store = store
        self._on_progress = on_progress
        self._on_refused = on_refused
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._wanted: dict[int, LoraDownload] = {}
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._closed = False
        self._checks = ThreadPoolExecutor(1, thread_name_prefix=f"checks-{store.name}")
        self._client = LinkClient(
            self,
            peer=f"LoRA store {store.name}",
            request=lambda link_id: offers.request(kinds.LORAS, store.address, link_id),
            settings=settings,
            counters=counters,
        )
        self._client.start()

    @property
    def linked(self) -> bool:
        """Whether there is a link."""
        return self._connection is not None

    @property
    def wants_link(self) -> bool:
        """As long as something is to be fetched."""
        return bool(self._wanted)

    def fetch(self, download: LoraDownload) -> None:
        """Asks for it, in the background."""
        with self._lock:
            number = next(self._numbers)
            self._wanted[number] = download
            if self._connection is not None:
                self._ask(self._connection, number, download)
        self._client.wake()

    def give_up(self, download: LoraDownload) -> None:
        """It is wanted elsewhere, or by nobody; what still comes of it is thrown away."""
        with self._lock:
            for number in [number for number, each in self._wanted.items() if each is download]:
                del self._wanted[number]
                if self._connection is not None:
                    self._connection.send(number_message(LoraMessageKind.CANCEL, number))

    def wanted(self) -> list[LoraDownload]:
        """What was asked for and has not come."""
        with self._lock:
            return list(self._wanted.values())

    def close(self) -> None:
        """Ends the link."""
        with self._lock:
            self._closed = True
        self._client.close()
        self._checks.shutdown(wait=False)  # what is here whole is still checked: somebody may wait for it

    def on_open(self, connection: Connection) -> None:
        """All that is wanted is asked for, on the new link."""
        with self._lock:
            self._connection = connection
            for number, download in self._wanted.items():
                self._ask(connection, number, download)
        assert connection.link is not None
        choice = connection.link.backend_choice
        facts = {"store": self.store.name, "backend": choice.backend, "why": choice.reason}
        _log.info("linked to a LoRA store", extra=facts)

    def on_end(self, cause: BottegaError) -> None:
        """What has not come is asked for again, here or elsewhere."""
        with self._lock:
            self._connection = None
        _log.warning("a LoRA store is lost", extra={"store": self.store.name, "text": cause.message})
        for download in self.wanted():
            download.restart()
        self._on_lost(self, cause)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """What a LoRA's head or piece may be is checked before its bytes come."""
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
                    raise ValueError(f"a store sends no {kind} message")

    def _ask(self, connection: Connection, number: int, download: LoraDownload) -> None:
        download.requested_s = time.monotonic()
        connection.send(messages.fetch_message(number, download.ref.digest))

    def _take_head(self, layout: Layout, views: list[memoryview]) -> None:
        times = messages.read_times(views[TIMES])
        unet_bytes = messages.read_unet_bytes(views[UNET_BYTES], max_bytes=MAX_FILE_BYTES)

        def take(download: LoraDownload) -> None:
            download.note_answer(self.store.name, times)
            download.take_head(bytes(views[HEADER]), views[TEXT], unet_bytes)

        self._take(read_number(layout, views), take)

    def _take(self, number: int, take: Callable[[LoraDownload], None]) -> None:
        """A part of a LoRA is here. Of one that nobody wants any more it is thrown away."""
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
        """All of a LoRA is here: it does not need the link any more, and what a prompt waits for can be read."""
        if file is None:
            raise ValueError("a whole LoRA came without its file")
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
        """In a thread of its own."""
        if download.given_up:
            return
        try:
            download.check()
        except DataLoss as error:
            self._on_refused(self, download, error)
        except Exception:  # noqa: BLE001 - a thread that waits must get the error
            _log.exception("a LoRA could not be checked", extra={"lora": download.ref.name})
            self._on_refused(self, download, InternalError("the worker could not check the LoRA"))
        else:
            self._on_progress()

    def _take_refusal(self, number: int, packed: bytes) -> None:
        refusal = job_error_from_json(packed)
        if (download := self._wanted.get(number)) is not None:
            # A store is asked by digest; people know it by its name.
            refusal.message = f"LoRA {download.ref.name}: {refusal.message}"
            refusal.metadata["loras"] = download.ref.name
        self._refuse(number, from_job_error(refusal))

    def _refuse(self, number: int, error: BottegaError) -> None:
        with self._lock:
            download = self._wanted.pop(number, None)
        if download is not None:
            self._on_refused(self, download, error)
