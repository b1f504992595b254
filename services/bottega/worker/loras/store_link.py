"""One LoRA store as a worker's engine sees it: a link, opened anew when it is lost while something is wanted.

Notices a store that is dead at once, and one that is silent within `silence_s`. What comes whole is checked in a thread
of its own, so that text that a prompt waits for waits for no other LoRA's hash. Knows LoRAs by number; keeps none.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf import json_format

from bottega.diffusion.loras import LoraStore
from bottega.errors import BottegaError, DataLoss, InternalError, LinkClosed, PeerDead
from bottega.lora import messages
from bottega.lora.canonical import MAX_FILE_BYTES
from bottega.lora.messages import HEADER, PIECE, TEXT, UNET_BYTES, LoraMessage, LoraMessageKind
from bottega.rpc.status import from_job_error
from bottega.transport import Deadline, Incoming, Keepalive, Limits, Link, LinkCounters, Offer, connect, link_boundary
from bottega.v1.error_pb2 import JobError
from bottega.worker.loras.download import LoraDownload

_log = logging.getLogger(__name__)

# Of offer and connection; a store that lives takes milliseconds.
_CONNECT_S = 5.0
# Between two attempts at a store that is down, while something is wanted of it.
_RETRY_S = 0.5
_CLOSED = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLinkSettings:
    """silence_s: after which a store is taken for dead. limits: of what comes in."""

    silence_s: float = 5.0
    # The slots grow to the largest message that came: a head, or a piece. A whole LoRA is a file beside its message.
    limits: Limits = field(default_factory=lambda: Limits(slots=messages.SLOTS, slot_bytes=MAX_FILE_BYTES + (1 << 20)))


class LoraOffers(Protocol):
    """Who brings offers of links."""

    def ask_loras(self, address: str, link_id: str) -> Future[Offer]:
        """An offer of the LoRA store at host:port. link_id: of the lost link that it replaces, or empty.

        Its exception is a BottegaError.
        """
        ...


class StoreLink:
    """`fetch` what is wanted; it is asked for as long as the link takes. Any thread may call it.

    on_news: called when more of something is here. on_refused: called with what the store will not send, and why.
    on_lost: called with all that was asked for when the store was lost, or could not be reached; what it takes out of
    the mapping is no longer wanted here.
    """

    def __init__(
        self,
        store: LoraStore,
        *,
        offers: LoraOffers,
        settings: LoraLinkSettings,
        counters: LinkCounters,
        on_news: Callable[[], None],
        on_refused: Callable[[StoreLink, LoraDownload, BottegaError], None],
        on_lost: Callable[[StoreLink, BottegaError], None],
    ) -> None:
        self.store = store
        self.linked = False
        self._peer = f"LoRA store {store.name}"
        self._offers = offers
        self._settings = settings
        self._counters = counters
        self._on_news = on_news
        self._on_refused = on_refused
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._wanted: dict[int, LoraDownload] = {}
        self._changed = threading.Condition()
        self._outbox: queue.SimpleQueue[LoraMessage | None] = queue.SimpleQueue()
        self._link: Link | None = None
        self._link_id = ""
        self._closed = False
        self._checks = ThreadPoolExecutor(1, thread_name_prefix=f"checks-{store.name}")
        threading.Thread(target=self._live, name=f"loras-{store.name}", daemon=True).start()

    def fetch(self, arrival: LoraDownload) -> None:
        """Asks for it, in the background."""
        with self._changed:
            number = next(self._numbers)
            self._wanted[number] = arrival
            if self.linked:
                self._outbox.put(messages.fetch_message(number, arrival.ref.digest))
            self._changed.notify_all()

    def give_up(self, arrival: LoraDownload) -> None:
        """It is wanted elsewhere, or by nobody; what still comes of it is thrown away."""
        with self._changed:
            for number in [number for number, each in self._wanted.items() if each is arrival]:
                del self._wanted[number]
                if self.linked:
                    self._outbox.put(messages.number_message(LoraMessageKind.CANCEL, number))

    def wanted(self) -> list[LoraDownload]:
        """What was asked for and has not come."""
        with self._changed:
            return list(self._wanted.values())

    def close(self) -> None:
        """Ends the link."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._checks.shutdown(wait=False)  # what is here whole is still checked: somebody may wait for it
        if self._link is not None:
            self._link.end(LinkClosed("the worker is stopping"))

    def _live(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted or self._closed)
                if self._closed:
                    return
            error = self._serve_once()
            _log.warning("a LoRA store is lost", extra={"store": self.store.name, "text": error.message})
            for arrival in self.wanted():
                arrival.begin_again()
            self._on_lost(self, error)
            time.sleep(_RETRY_S)

    def _serve_once(self) -> BottegaError:
        """Opens a link and serves it to its end; returns what it died of."""
        try:
            link = self._open()
        except BottegaError as error:
            return error
        except FutureTimeoutError:
            return PeerDead(f"{self._peer} made no offer within {_CONNECT_S:g} s")
        with link:
            sending = threading.Thread(target=self._send_all, args=(link,), name="sends", daemon=True)
            sending.start()
            with self._boundary(link):
                self._receive(link)
            with self._changed:
                self.linked, self._link = False, None
                self._outbox.put(_CLOSED)
            sending.join()  # ends: the link is dead, and so is every wait in it
            return link.cause or PeerDead("the link is gone")

    def _open(self) -> Link:
        deadline = Deadline.after(_CONNECT_S)
        offer = self._offers.ask_loras(self.store.address, self._link_id).result(_CONNECT_S)
        link = connect(offer, deadline, limits=self._settings.limits, counters=self._counters)
        self._link_id = link.link_id
        with self._changed:
            self._outbox = queue.SimpleQueue()
            for number, arrival in self._wanted.items():
                self._outbox.put(messages.fetch_message(number, arrival.ref.digest))
            self.linked, self._link = True, link
            if self._closed:
                link.end(LinkClosed("the worker is stopping"))
        facts = {"store": self.store.name, "backend": link.answer.backend, "why": link.answer.reason}
        _log.info("linked to a LoRA store", extra=facts)
        return link

    def _send_all(self, link: Link) -> None:
        outbox = self._outbox
        with self._boundary(link):
            while (message := outbox.get()) is not _CLOSED:
                link.send(message.layout, message.buffers, Deadline.after(self._settings.silence_s))

    def _boundary(self, link: Link) -> AbstractContextManager[None]:
        return link_boundary(link, here="the worker", peer=self._peer)

    def _receive(self, link: Link) -> None:
        vigil = Keepalive(
            link,
            peer=self._peer,
            silence_s=self._settings.silence_s,
            ping=lambda: self._outbox.put(messages.number_message(LoraMessageKind.PING)),
        )
        while True:
            with vigil.next() as incoming:
                match messages.kind_of(incoming.layout):
                    case LoraMessageKind.LORA:
                        messages.check_lora(incoming.layout, max_bytes=MAX_FILE_BYTES)
                        vigil.wait_all(incoming)
                        self._take(incoming, lambda arrival: _take_head(arrival, incoming))
                    case LoraMessageKind.WHOLE:
                        vigil.wait_all(incoming)
                        self._take_whole(incoming)
                    case LoraMessageKind.PIECE:
                        messages.check_piece(incoming.layout, max_bytes=MAX_FILE_BYTES)
                        vigil.wait_all(incoming)
                        self._take(incoming, lambda arrival: arrival.take_piece(incoming.view(PIECE)))
                    case LoraMessageKind.REFUSED:
                        vigil.wait_all(incoming)
                        self._take_refusal(incoming)
                    case LoraMessageKind.PONG:
                        vigil.wait_all(incoming)
                    case kind:
                        raise ValueError(f"a store says no {kind}")

    def _take(self, incoming: Incoming, take: Callable[[LoraDownload], None]) -> None:
        """A part of a LoRA is here. Of one that nobody wants any more it is thrown away."""
        number = messages.read_number(incoming.layout, incoming.view(0))
        arrival = self._wanted.get(number)
        if arrival is None:
            return
        knew_text = arrival.text_ready
        try:
            take(arrival)
        except DataLoss as error:
            self._refuse(number, error)
            return
        if arrival.ready:
            with self._changed:
                self._wanted.pop(number, None)
        if arrival.ready or not knew_text:
            self._on_news()

    def _take_whole(self, incoming: Incoming) -> None:
        """All of a LoRA is here: it does not need the link any more, and what a prompt waits for can be read."""
        file = incoming.file
        if file is None:
            raise ValueError("a whole LoRA came without its file")
        number = messages.read_number(incoming.layout, incoming.view(0))
        arrival = self._wanted.get(number)
        if arrival is None:
            return
        try:
            arrival.take_whole(file)
        except DataLoss as error:
            self._refuse(number, error)
            return
        with self._changed:
            self._wanted.pop(number, None)
            if not self._closed:
                self._checks.submit(self._check, arrival)
        self._on_news()

    def _check(self, arrival: LoraDownload) -> None:
        """In a thread of its own."""
        if arrival.given_up:
            return
        try:
            arrival.check()
        except DataLoss as error:
            self._on_refused(self, arrival, error)
        except Exception:  # noqa: BLE001 - whoever waits must hear of a fault of ours
            _log.exception("a LoRA could not be checked", extra={"lora": arrival.ref.name})
            self._on_refused(self, arrival, InternalError("the worker could not check the LoRA"))
        else:
            self._on_news()

    def _take_refusal(self, incoming: Incoming) -> None:
        layout = incoming.layout
        number, packed = messages.read_refusal(layout, [incoming.view(index) for index in range(len(layout.specs))])
        try:
            refusal = json_format.Parse(packed, JobError())
        except json_format.ParseError as problem:
            raise ValueError(f"a refusal that cannot be read: {problem}") from None
        if (arrival := self._wanted.get(number)) is not None:
            # A store is asked by digest; people know it by its name.
            refusal.message = f"LoRA {arrival.ref.name}: {refusal.message}"
            refusal.metadata["loras"] = arrival.ref.name
        self._refuse(number, from_job_error(refusal))

    def _refuse(self, number: int, error: BottegaError) -> None:
        with self._changed:
            arrival = self._wanted.pop(number, None)
        if arrival is not None:
            self._on_refused(self, arrival, error)


def _take_head(arrival: LoraDownload, incoming: Incoming) -> None:
    unet_bytes = messages.read_unet_bytes(incoming.view(UNET_BYTES), max_bytes=MAX_FILE_BYTES)
    arrival.take_head(bytes(incoming.view(HEADER)), incoming.view(TEXT), unet_bytes)
