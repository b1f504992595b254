"""One worker's link: what it asks for, and LoRAs sent from memory or disk into its slots. Ends with the link.

Two threads: one receives and checks, one sends. What breaks the rules of the messages ends the link, and no other.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from google.protobuf import json_format

from bottega.errors import (
    BadFrame,
    BottegaError,
    DataLoss,
    InternalError,
    LinkError,
    NoSharedMemory,
    PeerDead,
    TooLarge,
)
from bottega.lora import messages
from bottega.lora.canonical import Canonical, parse
from bottega.lora.messages import Kind, Message
from bottega.lora.safetensors_header import LENGTH_BYTES, header_bytes
from bottega.loras.tiers import Loan, Tiers
from bottega.rpc.status import to_job_error
from bottega.transport import Deadline, Incoming, Link, Listener, Offer

_log = logging.getLogger(__name__)

# A worker takes up an offer at once, or not at all.
_ACCEPT_S = 10.0
# A worker says something every few seconds, or is gone.
_SILENCE_S = 30.0
# A message whose beginning is here must come to its end.
_MESSAGE_S = 20.0
# Without a limit of its own, a LoRA that is not taken in this time never will be; with one, it has that time as well.
_SEND_S = 60.0
_PIECE_BYTES = 4 << 20
_CLOSED = None
# Fetches of one worker that wait; it runs some tens of requests with at most eight LoRAs each.
_MOST_WAITING = 512


class WorkerLink:
    """Serves one offer, from the worker's taking it up to the link's end. on_end: called once, when it has ended.

    bytes_per_s: of the link; 0 is without a limit.
    """

    def __init__(
        self,
        listener: Listener,
        offer: Offer,
        *,
        worker: str,
        tiers: Tiers,
        bytes_per_s: int,
        on_end: Callable[[WorkerLink], None],
    ) -> None:
        self.worker = worker
        self._listener = listener
        self._offer = offer
        self._tiers = tiers
        self._bytes_per_s = bytes_per_s
        self._on_end = on_end
        self._link: Link | None = None
        self._closed = False
        self._waiting = 0
        self._lock = threading.Lock()
        # Loads end when they end: one that ends after the link has nobody to answer to.
        self._ended = False
        self._answers: queue.SimpleQueue[Callable[[Link], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"link-{offer.link_id[:8]}", daemon=True)

    def start(self) -> None:
        """Serves it in the background."""
        self._thread.start()

    def close(self, cause: LinkError) -> None:
        """Ends it, and waits for its threads."""
        self._closed = True
        link = self._link
        if link is not None:
            link.end(cause)
            self._thread.join(_MESSAGE_S)

    def _live(self) -> None:
        try:
            link = self._link = self._listener.accept(self._offer, Deadline.after(_ACCEPT_S))
        except LinkError as error:
            _log.info("an offer of a link was not taken up", extra={"worker": self.worker, "text": error.message})
            self._on_end(self)
            return
        if self._closed:
            link.end(PeerDead("the LoRA store is stopping"))
        _log.info("a worker is linked", extra={"worker": self.worker, "backend": link.answer.backend})
        answering = threading.Thread(target=self._answer, args=(link,), name="answers", daemon=True)
        answering.start()
        try:
            self._receive(link)
        except LinkError as error:
            link.end(error)
        except ValueError as error:
            link.end(BadFrame(f"the worker broke the rules of its messages: {error}"))
        except Exception:  # noqa: BLE001 - the boundary of a link: a fault of ours ends this one only
            _log.exception("a link could not be served", extra={"worker": self.worker})
            link.end(PeerDead("the store could not serve the link"))
        with self._lock:
            self._ended = True
            self._answers.put(_CLOSED)
        answering.join()  # ends: the link is dead, and so is every wait in it
        self._end(link)

    def _end(self, link: Link) -> None:
        link.close()
        cause = link.cause
        facts = {"worker": self.worker, "cause": type(cause).__name__, "text": cause.message if cause else ""}
        _log.info("a worker's link has ended", extra=facts)
        self._on_end(self)

    def _receive(self, link: Link) -> None:
        while True:
            with link.recv(Deadline.after(_SILENCE_S)) as incoming:
                incoming.wait_all(Deadline.after(_MESSAGE_S))
                self._take(incoming)

    def _take(self, incoming: Incoming) -> None:
        layout = incoming.layout
        views = [incoming.view(index) for index in range(len(layout.specs))]
        match messages.kind_of(layout):
            case Kind.FETCH:
                self._fetch(*messages.read_fetch(layout, views))
            case Kind.PING:
                self._say(messages.number_message(Kind.PONG))
            case kind:
                raise ValueError(f"a worker says no {kind}")

    def _fetch(self, number: int, digest: str) -> None:
        with self._lock:
            if self._waiting >= _MOST_WAITING:
                raise ValueError(f"a worker waits for at most {_MOST_WAITING} LoRAs")
            self._waiting += 1
        # Called by whoever loads: what is to be sent is sent by the thread that answers.
        self._tiers.borrow(digest).add_done_callback(lambda asked: self._loaded(number, asked))

    def _loaded(self, number: int, asked: Future[Loan]) -> None:
        with self._lock:
            if not self._ended:
                self._answers.put(lambda link: self._hand_out(link, number, asked))
            elif asked.exception() is None:
                self._tiers.give_back(asked.result())

    def _hand_out(self, link: Link, number: int, asked: Future[Loan]) -> None:
        with self._lock:
            self._waiting -= 1
        try:
            loan = asked.result(timeout=0)
        except BottegaError as error:
            self._refuse(link, number, error)
            return
        try:
            self._send_lora(link, number, loan)
        except (NoSharedMemory, TooLarge, DataLoss) as error:  # nothing of it was sent, and the link lives
            self._refuse(link, number, error)
        finally:
            self._tiers.give_back(loan)

    def _send_lora(self, link: Link, number: int, loan: Loan) -> None:
        """Reads the file straight into a slot, and says after its text encoders' section that it is there."""
        lora = _header(loan)
        layout = messages.lora_layout(lora)
        expected_s = loan.size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        pace = _Pace(self._bytes_per_s)
        with link.begin(layout, Deadline.after(_SEND_S + 2 * expected_s)) as outgoing:
            outgoing.views[0][:] = messages.packed_number(number)
            place = 0
            for index, size_bytes in (
                (messages.HEADER, lora.header_bytes),
                (messages.TEXT, lora.text_bytes),
                (messages.UNET, lora.unet_bytes),
            ):
                _fill(outgoing.views[index], loan.descriptor, place, size_bytes, pace)
                place += size_bytes
                if index == messages.TEXT:
                    outgoing.ready(index + 1)
            outgoing.finish()

    def _refuse(self, link: Link, number: int, error: BottegaError) -> None:
        packed = json_format.MessageToJson(to_job_error(error), indent=None).encode()
        _send(link, messages.refused_message(number, packed))

    def _answer(self, link: Link) -> None:
        """The thread that sends. It goes on when the link is dead, so that what was borrowed for it is given back."""
        while (answer := self._answers.get()) is not _CLOSED:
            self._do(answer, link)

    def _do(self, answer: Callable[[Link], None], link: Link) -> None:
        try:
            answer(link)
        except LinkError as error:
            link.end(error)
        except BottegaError as error:
            link.end(PeerDead(f"the store could not answer: {error.message}"))
        except Exception:  # noqa: BLE001 - the boundary of a link: a fault of ours ends this one only
            _log.exception("a link could not be answered", extra={"worker": self.worker})
            link.end(PeerDead("the store could not answer"))

    def _say(self, message: Message) -> None:
        self._answers.put(lambda link: _send(link, message))


class _Pace:
    """Keeps a sender to so many bytes a second; 0 does not."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._until = time.monotonic()

    def spend(self, size_bytes: int) -> None:
        """Waits until they may be sent."""
        if self._bytes_per_s:
            self._until += size_bytes / self._bytes_per_s
            time.sleep(max(0.0, self._until - time.monotonic()))


def _header(loan: Loan) -> Canonical:
    size = header_bytes(os.pread(loan.descriptor, LENGTH_BYTES, 0))
    try:
        return parse(os.pread(loan.descriptor, size, 0), file_bytes=loan.size_bytes)
    except BottegaError as error:
        raise DataLoss(f"the LoRA's file is damaged: {error.message}") from error


def _fill(view: memoryview, descriptor: int, place: int, size_bytes: int, pace: _Pace) -> None:
    """Reads bytes of a file into a tensor of a slot. Raises InternalError where the file has become shorter."""
    if not size_bytes:
        view[:] = bytes(len(view))
    done = 0
    while done < size_bytes:
        piece = view[done : min(done + _PIECE_BYTES, size_bytes)]
        got = os.preadv(descriptor, [piece], place + done)
        if not got:
            raise InternalError("the LoRA's file has become shorter while it was sent")
        done += got
        pace.spend(got)


def _send(link: Link, message: Message) -> None:
    link.send(message.layout, message.buffers, Deadline.after(_MESSAGE_S))
