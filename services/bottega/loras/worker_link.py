"""One worker's link: what it asks for, and LoRAs sent from memory or disk into its slots. Ends with the link.

Two threads: one receives and checks, one sends: first whatever there is to say, else a piece of the LoRA that has been
on its way for longest. What breaks the rules of the messages ends the link, and no other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from google.protobuf import json_format

from bottega.errors import BadFrame, BottegaError, InternalError, LinkError, NoSharedMemory, PeerDead, TooLarge
from bottega.lora import messages
from bottega.lora.messages import Kind, Message
from bottega.loras.sending import Pace, Sending
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
        self._pace = Pace(bytes_per_s)
        # Of the thread that sends: the first one is sent, the others have sent their heads.
        self._sendings: deque[Sending] = deque()
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
            sending = Sending(number, loan)
        except BottegaError as error:
            self._tiers.give_back(loan)
            self._refuse(link, number, error)
            return
        self._sendings.append(sending)
        self._advance(link, sending, sending.send_head)

    def _advance(self, link: Link, sending: Sending, send: Callable[[Link, Pace], None]) -> None:
        """Sends the next of a LoRA; gives it back when that was all, or nothing more of it can be sent."""
        try:
            send(link, self._pace)
        except (NoSharedMemory, TooLarge, InternalError) as error:  # the link lives
            self._drop(sending)
            self._refuse(link, sending.number, error)
        else:
            if sending.done:
                self._drop(sending)

    def _drop(self, sending: Sending) -> None:
        self._sendings.remove(sending)
        self._tiers.give_back(sending.loan)

    def _refuse(self, link: Link, number: int, error: BottegaError) -> None:
        packed = json_format.MessageToJson(to_job_error(error), indent=None).encode()
        _send(link, messages.refused_message(number, packed))

    def _answer(self, link: Link) -> None:
        """The thread that sends. It goes on when the link is dead, so that what was borrowed for it is given back."""
        while (answer := self._next(link)) is not _CLOSED:
            self._do(answer, link)
        while self._sendings:
            self._drop(self._sendings[0])

    def _next(self, link: Link) -> Callable[[Link], None] | None:
        """What is to be said, as soon as there is something; a piece of a LoRA meanwhile."""
        if not self._sendings or link.cause is not None:
            return self._answers.get()
        try:
            return self._answers.get(timeout=self._pace.wait_s)
        except queue.Empty:
            first = self._sendings[0]
            return lambda link: self._advance(link, first, first.send_piece)

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


def _send(link: Link, message: Message) -> None:
    link.send(message.layout, message.buffers, Deadline.after(_MESSAGE_S))
