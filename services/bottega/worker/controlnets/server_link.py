"""One ControlNet server as a worker's engine sees it: a link, with a thread that sends and one that receives.

It notices a server that is dead at once, one that is silent within `silence_s`, as a server answers pings whatever it
computes, and one that computes nothing within `stall_s`. Knows loans and steps by number; knows no rows.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from google.protobuf import json_format

from bottega.diffusion.controlnets.messages import (
    ControlMessageKind,
    ControlStep,
    kind_of,
    number_message,
    read_number,
    read_refusal,
    step_message,
)
from bottega.diffusion.controlnets.provider import ControlServer
from bottega.diffusion.tensor_messages import TensorMessage, tensor_of
from bottega.errors import (
    AuthFailed,
    BottegaError,
    DeadlineExceeded,
    LayoutMismatch,
    LeaseExpired,
    LinkClosed,
    LinksFull,
    NoSharedMemory,
    PeerDead,
    TooLarge,
    Unavailable,
)
from bottega.rpc.status import from_job_error
from bottega.transport import Deadline, Incoming, Keepalive, Limits, Link, LinkCounters, Offer, connect, link_boundary
from bottega.v1.error_pb2 import JobError
from bottega.worker.controlnets.condition import ChangeCondition
from bottega.worker.controlnets.step_result import StepResult

_log = logging.getLogger(__name__)

# Of offer and connection; a server that lives takes milliseconds.
_CONNECT_S = 5.0
# Until a new offer is asked for in the place of one that was not taken, where the server does not say when.
_AGAIN_S = 0.5
# Messages that wait to be sent; each request has a few.
_MOST_WAITING = 1024
_CLOSED = None
# For an end to be told; whoever does not hear it notices that the link is gone.
_END_S = 0.5
# A vigil looks at a quiet link several times a second. One look that is later than this says that this process itself
# was stopped: what the server has said meanwhile is read now.
_LATE_S = 1.0


class Offers(Protocol):
    """Who brings offers of links."""

    def ask(self, address: str, link_id: str) -> Future[Offer]:
        """An offer of the ControlNet server at host:port. link_id: of the lost link that it replaces, or empty.

        Its exception is a BottegaError.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """silence_s: after which a server is taken for dead. limits: of what comes in.

    stall_s: after which one is given up whose forwards show no sign of life though it owes an answer: longer than the
    longest block of a network takes, or the embedding of a control image.
    """

    silence_s: float = 5.0
    stall_s: float = 20.0
    limits: Limits = field(default_factory=lambda: Limits(slots=8, slot_bytes=1 << 30))


@dataclass(slots=True, kw_only=True, eq=False)
class LeaseStatus:
    """What the server has said of a loan that it was asked for: that it is open, or why it will not be."""

    opened: bool = False
    refusal: BottegaError | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sending:
    """A message that waits to be sent. loan, step: of which it is, where it asks for one."""

    message: TensorMessage
    loan: int | None = None
    step: int | None = None


class ServerLink:
    """`start` it, use it at once: what is sent waits for the link. One thread uses it; when `lost`, it is over.

    lost: why the link has ended, once it has. answer_s: seconds from a step to its whole answer, of late; 0 is not
    known. transfer_s: from the answer's beginning on; 0 within this host, where whoever waits waits for a processor.
    """

    def __init__(
        self,
        server: ControlServer,
        *,
        offers: Offers,
        news: ChangeCondition,
        settings: LinkSettings,
        counters: LinkCounters,
    ) -> None:
        self.server = server
        self.lost: BottegaError | None = None
        self.answer_s = self.transfer_s = 0.0
        self.link_id = ""
        self._offers = offers
        self._news = news
        self._settings = settings
        self._counters = counters
        self._numbers = itertools.count(1)
        self._loans: dict[int, LeaseStatus] = {}  # that were not answered yet
        self._replies: dict[int, StepResult] = {}
        self._outbox: queue.Queue[_Sending | None] = queue.Queue(_MOST_WAITING)
        self._outstanding: list[StepResult] = []
        self._pulse = 0
        self._pulse_s = self._checked_s = 0.0
        self._link: Link | None = None
        self._thread: threading.Thread | None = None

    @property
    def slot_bytes(self) -> int:
        """Most bytes of one answer."""
        return self._settings.limits.slot_bytes

    def start(self, before: str = "") -> None:
        """Opens the link in the background. before: the id of the one that it replaces."""
        self._thread = threading.Thread(target=self._live, args=(before,), name=f"link-{self.server.name}", daemon=True)
        self._thread.start()

    def open(self, loan: int, message: TensorMessage) -> LeaseStatus:
        """Asks for a loan, in the background; what it returns will say what came of it, unless the link is lost."""
        answer = self._loans[loan] = LeaseStatus()
        self._put(_Sending(message=message, loan=loan))
        return answer

    def close(self, loan: int) -> None:
        """Ends a loan, in the background."""
        self._loans.pop(loan, None)
        self._put(_Sending(message=number_message(ControlMessageKind.CLOSE, loan)))

    def ask(self, step: ControlStep, reply: StepResult) -> None:
        """Asks for a step, whose number is new, in the background; the answer goes there."""
        if not self._replies:
            self._pulse_s = time.monotonic()
        self._replies[step.number] = reply
        self._outstanding.append(reply)
        self._put(_Sending(message=step_message(step), step=step.number))

    def number(self) -> int:
        """A number that no other step of the link has."""
        return next(self._numbers)

    @property
    def has_slots_to_spare(self) -> bool:
        """Whether answers hold, or will hold, less than half of the slots."""
        return len(self._outstanding) < self._settings.limits.slots // 2

    def spare_slots(self) -> None:
        """Copies answers where they hold half of the slots: the server must always have some to answer into.

        To be called when nobody looks at what is in them.
        """
        self._outstanding = [reply for reply in self._outstanding if reply.holds_memory]
        if not self.has_slots_to_spare:
            for reply in self._outstanding:
                if reply.whole:
                    reply.keep_copy()
            self._outstanding = [reply for reply in self._outstanding if reply.holds_memory]

    def end(self) -> None:
        """Closes the link, and tells the server."""
        self._lose(LinkClosed("the worker is stopping"))
        if self._thread is not None:
            self._thread.join(_END_S)

    def _live(self, before: str) -> None:
        try:
            link = self._open(before)
        except FutureTimeoutError:
            self._lose(Unavailable(f"ControlNet server {self.server.name} made no offer within {_CONNECT_S:g} s"))
        except BottegaError as error:
            self._lose(error)
        except Exception:  # noqa: BLE001 - the boundary of a link: a fault of ours loses this one only
            _log.exception("a link could not be opened", extra={"server": self.server.name})
            self._lose(PeerDead("the worker could not open the link"))
        else:
            self._serve(link)

    def _serve(self, link: Link) -> None:
        """The link from its beginning to its end."""
        with link:
            self._link = link
            if self.lost is not None:
                return  # meanwhile
            sending = threading.Thread(target=self._send_all, args=(link,), name="sends", daemon=True)
            sending.start()
            with self._boundary(link):
                self._receive(link)
            self._lose(link.cause or PeerDead("the worker could not serve the link"))
            sending.join()  # ends: the link is dead, and so is every wait in it

    def _open(self, before: str) -> Link:
        link = self._connected(before, Deadline.after(_CONNECT_S))
        self.link_id = link.link_id
        facts = {"server": self.server.name, "backend": link.answer.backend, "why": link.answer.reason}
        _log.info("linked to a ControlNet server", extra=facts)
        return link

    def _connected(self, before: str, deadline: Deadline) -> Link:
        """A server that is full of links, or of offers, is asked again while there is time: places come free."""
        while True:
            try:
                offer = self._offers.ask(self.server.address, before).result(deadline.left_s())
                return connect(offer, deadline, limits=self._settings.limits, counters=self._counters)
            except (LinksFull, AuthFailed) as error:  # the offer may have been given up for others' before it was used
                wait_s = error.retry_after_s or _AGAIN_S
                if self.lost is not None or deadline.left_s() <= wait_s:
                    raise
                time.sleep(wait_s)

    def _lose(self, error: BottegaError) -> None:
        if self.lost is None:
            if not isinstance(error, LinkClosed):
                _log.warning("a ControlNet server is lost", extra={"server": self.server.name, "text": error.message})
            self.lost = error
        if not self._finish_sending() and self._link is not None:
            self._link.end(PeerDead("the ControlNet server takes nothing"))
        self._news.ring()

    def _put(self, sending: _Sending) -> None:
        try:
            self._outbox.put_nowait(sending)
        except queue.Full:
            self._lose(Unavailable(f"ControlNet server {self.server.name} takes nothing"))

    def _finish_sending(self) -> bool:
        """Has the thread that sends end the link, after what waits to be sent; whether it will hear of it."""
        try:
            self._outbox.put_nowait(_CLOSED)
        except queue.Full:
            return False
        return True

    def _send_all(self, link: Link) -> None:
        with self._boundary(link):
            while (sending := self._outbox.get()) is not _CLOSED:
                try:
                    message = sending.message
                    link.send(message.layout, message.buffers, Deadline.after(self._settings.silence_s))
                except (NoSharedMemory, TooLarge) as error:  # the link lives
                    self._refuse(error, loan=sending.loan, step=sending.step)
            link.end(LinkClosed("the worker has closed the link"))

    def _boundary(self, link: Link) -> AbstractContextManager[None]:
        return link_boundary(link, here="the worker", peer=f"ControlNet server {self.server.name}")

    def _receive(self, link: Link) -> None:
        vigil = Keepalive(
            link,
            peer=f"ControlNet server {self.server.name}",
            silence_s=self._settings.silence_s,
            ping=lambda: self._put(_Sending(message=number_message(ControlMessageKind.PING))),
            check=self._check_pulse,
        )
        while True:
            incoming = vigil.next()
            if kind_of(incoming.layout) is ControlMessageKind.RESIDUALS:
                self._take_residuals(link, vigil, incoming)
                continue
            with incoming:
                vigil.wait_all(incoming)
                self._take(incoming)
            self._news.ring()

    def _take(self, incoming: Incoming) -> None:
        layout = incoming.layout
        views = [incoming.view(index) for index in range(len(layout.specs))]
        match kind_of(layout):
            case ControlMessageKind.PONG:
                self._feel(read_number(layout, views))
            case ControlMessageKind.OPENED:
                if (answer := self._loans.pop(read_number(layout, views), None)) is not None:
                    answer.opened = True
            case ControlMessageKind.REFUSED:
                refusal = read_refusal(layout, views)
                error = from_job_error(json_format.Parse(refusal.error, JobError()))
                self._refuse(error, loan=refusal.loan, step=refusal.step)
            case kind:
                raise ValueError(f"a server says no {kind}")

    def _refuse(self, error: BottegaError, *, loan: int | None, step: int | None) -> None:
        """A loan will not be opened, or a step not be computed."""
        if loan is not None and (answer := self._loans.pop(loan, None)) is not None:
            answer.refusal = error
        if step is not None and (reply := self._replies.pop(step, None)) is not None:
            _log.warning("a step was refused", extra={"server": self.server.name, "text": error.message})
            reply.refused = True
            self._pulse_s = time.monotonic()
        self._news.ring()

    def _take_residuals(self, link: Link, vigil: Keepalive, incoming: Incoming) -> None:
        vigil.wait(incoming, 1)
        number = read_number(incoming.layout, [incoming.view(0)])
        reply = self._replies.pop(number, None)
        if reply is None:
            raise ValueError(f"the answer to step {number}, which was not asked for")
        if reply.layout.digest != incoming.layout.digest:
            raise LayoutMismatch(f"the answer to step {number} has other residuals than the model takes")
        reply.begin(incoming.release)
        for index in range(1, len(incoming.layout.specs)):
            vigil.wait(incoming, index + 1)
            try:
                view = incoming.view(index)
            except LeaseExpired:
                continue  # nobody reads it any more
            reply.put(reply.points - index, tensor_of(incoming.layout.specs[index], view))
            self._news.ring()
        self._pulse_s = time.monotonic()
        self.answer_s = _smoothed(self.answer_s, self._pulse_s - reply.asked_s)
        if not link.answer.backend.within_host:
            self.transfer_s = _smoothed(self.transfer_s, self._pulse_s - incoming.began)

    def _feel(self, pulse: int) -> None:
        """The server has counted so many signs of life of its forwards."""
        if pulse != self._pulse:
            self._pulse, self._pulse_s = pulse, time.monotonic()

    def _check_pulse(self) -> None:
        """Raises DeadlineExceeded when the server answers pings, and computes nothing of what it was asked for."""
        now_s = time.monotonic()
        late, self._checked_s = now_s - self._checked_s > _LATE_S, now_s
        if late:
            self._pulse_s = now_s  # this process was stopped itself, and heard nothing of what the server said
        still_s = now_s - self._pulse_s
        if self._replies and still_s > self._settings.stall_s:
            raise DeadlineExceeded(
                f"ControlNet server {self.server.name} owes an answer and has computed nothing for {still_s:.1f} s"
            )


def _smoothed(before: float, now: float) -> float:
    return now if before == 0.0 else before + 0.3 * (now - before)
