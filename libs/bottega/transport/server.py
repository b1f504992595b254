"""Links as a service serves them to workers: offered, counted, ended together; a thread receives, another answers.

It knows no message: what comes is its user's to read, and so is what goes out.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Generic, Protocol, TypeVar, cast

from bottega.errors import Draining, LinkClosed, LinkError, LinksFull
from bottega.sampled_log import SampledLog
from bottega.transport.boundary import link_boundary
from bottega.transport.channel.buffers import Buffer
from bottega.transport.channel.receiver import Incoming
from bottega.transport.deadline import Deadline
from bottega.transport.handshake.offer import Offer, TcpEndpoint
from bottega.transport.layout import Layout
from bottega.transport.link import Link
from bottega.transport.listener import LinkListener
from bottega.transport.memory.sealed_file import SealedFile

_log = logging.getLogger(__name__)

# A message whose beginning is here must come to its end, and an answer must be taken.
MESSAGE_S = 20.0
# A worker takes up an offer at once, or not at all: for a LinkListener's token_s.
TOKEN_S = 5.0
# The listener ends the wait.
_ACCEPT_S = 2 * TOKEN_S
# A worker says something every few seconds (vigil.py), or is gone.
_SILENCE_S = 30.0
# Of workers: each has one link. Offers that nobody has taken up yet are no links; the listener bounds those.
_MOST_LINKS = 256
# Most suites have all their workers on a few hosts; some links are left for another one.
_MOST_LINKS_OF_HOST = 192
# One worker's link may end at any moment; those who were refused together shall not come back together.
_RETRY_S = (0.5, 1.5)
_CLOSED = None


class WholeMessage(Protocol):
    """A whole message: its layout, and a buffer for each of its tensors."""

    @property
    def layout(self) -> Layout: ...

    @property
    def buffers(self) -> Sequence[Buffer]: ...


class LinkLog:
    """What the log says of links: anybody who may ask for offers can have as many of these lines as they like.

    linked, ended: what the lines say.
    """

    def __init__(self, log: logging.Logger, *, linked: str, ended: str) -> None:
        self.not_taken_up = SampledLog(
            log, "an offer of a link was not taken up", more="more offers of links were not taken up", counted="offers"
        )
        self.linked = SampledLog(log, linked, more="more links were opened", counted="links")
        self.ended = SampledLog(log, ended, more="more links have ended", counted="links")

    def sum_up(self) -> None:
        """See SampledLog."""
        for lines in (self.not_taken_up, self.linked, self.ended):
            lines.sum_up()


LINK_LOG = LinkLog(_log, linked="a worker is linked", ended="a worker's link has ended")


class LinkHandler(ABC):
    """Serves one offer, from its being taken up to the link's end. on_end: called once, when it has ended.

    service: what this end is, as texts name it. worker: the other's name. answers: what waits for the thread that
    answers; None is the end.
    """

    def __init__(
        self, listener: LinkListener, offer: Offer, *, service: str, worker: str, on_end: Callable[[LinkHandler], None]
    ) -> None:
        self.worker = worker
        self._service = service
        self._listener = listener
        self._offer = offer
        self._on_end = on_end
        self._link: Link | None = None
        self._cause: LinkError | None = None
        # What is to be answered may come when it comes: after the end there is nobody to answer to.
        self._ending = threading.Lock()
        self._ended = False
        self.answers: queue.SimpleQueue[Callable[[Link], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"link-{offer.link_id[:8]}", daemon=True)

    @property
    def linked(self) -> bool:
        """Whether the offer was taken up."""
        return self._link is not None

    def start(self) -> None:
        """Serves it in the background."""
        self._thread.start()

    def close(self, cause: LinkError) -> None:
        """Ends it, and waits for its threads."""
        self._cause = cause
        link = self._link
        if link is not None:
            link.end(cause)
            self._thread.join(MESSAGE_S)

    def answer(self, answer: Callable[[Link], None]) -> bool:
        """Has the thread that answers do something; whether it will, which it does on a dead link, too."""
        with self._ending:
            if not self._ended:
                self.answers.put(answer)
            return not self._ended

    def say(self, message: WholeMessage) -> None:
        """Has a whole message sent, as long as somebody is there."""
        self.answer(lambda link: send(link, message))

    @abstractmethod
    def take(self, incoming: Incoming) -> None:
        """A message is here, whole; to be given back. Raises ValueError for one that breaks the rules."""

    @abstractmethod
    def end(self) -> None:
        """The link is dead: what was borrowed for it is given back."""

    def next_answer(self, link: Link) -> Callable[[Link], None] | None:
        """What the thread that answers does next, as soon as there is something; None ends it. Whoever has something
        to do in the gaps says so here, and takes what is in `answers` first."""
        return self.answers.get()

    def _live(self) -> None:
        facts = {"worker": self.worker}
        try:
            link = self._link = self._listener.accept(self._offer, Deadline.after(_ACCEPT_S))
        except LinkError as error:
            LINK_LOG.not_taken_up.tell(details={**facts, "text": error.message})
            self._on_end(self)
            return
        if self._cause is not None:
            link.end(self._cause)
        LINK_LOG.linked.tell({"backend": link.answer.backend}, facts)
        answering = threading.Thread(target=self._answer, args=(link,), name="answers", daemon=True)
        answering.start()
        with self._boundary(link):
            self._receive(link)
        with self._ending:
            self._ended = True
            self.answers.put(_CLOSED)
        answering.join()  # ends: the link is dead, and so is every wait in it
        self.end()
        link.close()
        cause = link.cause
        facts |= {"text": cause.message if cause else ""}
        LINK_LOG.ended.tell({"cause": type(cause).__name__}, facts)
        self._on_end(self)

    def _receive(self, link: Link) -> None:
        while True:
            incoming = link.recv(Deadline.after(_SILENCE_S))
            incoming.wait_all(Deadline.after(MESSAGE_S))
            self.take(incoming)

    def _answer(self, link: Link) -> None:
        """The thread that answers. It goes on when the link is dead, so that what an answer holds is given back."""
        while (answer := self.next_answer(link)) is not _CLOSED:
            with self._boundary(link):
                answer(link)

    def _boundary(self, link: Link) -> AbstractContextManager[None]:
        return link_boundary(link, here=self._service, peer="the worker")


Served = TypeVar("Served", bound=LinkHandler)


class LinkServer(Generic[Served]):
    """Offers links, and keeps those that are open. Any thread may call it.

    service: what this end is, as texts name it. serve: makes a link of an offer, a worker's name, and what it calls at
    its end. advertised: what workers are told instead of the listener's own address.
    """

    def __init__(
        self,
        listener: LinkListener,
        *,
        service: str,
        serve: Callable[[Offer, str, Callable[[LinkHandler], None]], Served],
        advertised: TcpEndpoint | None = None,
    ) -> None:
        self.draining = False
        self._listener = listener
        self._service = service
        self._serve = serve
        self._advertised = advertised
        # With offers that nobody has taken up yet.
        self._links: dict[Served, str] = {}  # by host of whoever asked
        self._lock = threading.Lock()

    @property
    def open(self) -> list[Served]:
        """Those that there are."""
        with self._lock:
            return [link for link in self._links if link.linked]

    def offer(self, worker: str, link_id: str, *, caller: str) -> Offer:
        """An offer for a worker. link_id: of the link that it replaces, or empty. caller: host of whoever asks.

        Raises Draining, LinksFull, InvalidRequest for what is no name of a link.
        """
        if self.draining:
            raise Draining(f"{self._service} is stopping")
        self._check_room(caller)
        offer = self._listener.offer(link_id or None, caller=caller)
        link = self._serve(offer, worker, self._forget)
        with self._lock:
            self._links[link] = caller
        try:
            link.start()
        except RuntimeError:  # no thread is left
            self._forget(link)
            raise
        return offer if self._advertised is None else replace(offer, tcp=self._advertised)

    def _check_room(self, caller: str) -> None:
        """Raises LinksFull. One host gets a part of all, so that some are left for another one."""
        with self._lock:
            callers = [whose for link, whose in self._links.items() if link.linked]
        for count, most, whose in (
            (len(callers), _MOST_LINKS, "workers"),
            (callers.count(caller), _MOST_LINKS_OF_HOST, "workers of your host"),
        ):
            if count >= most:
                raise LinksFull(
                    f"{most} {whose} are linked with {self._service}, as many as may be",
                    metadata={"limit": "links"},
                    retry_after_s=random.uniform(*_RETRY_S),
                )

    def drain(self) -> None:
        """No offers from now on."""
        self.draining = True

    def close(self) -> None:
        """Takes no links any more, and ends those that there are. It may wait for what is being sent to end."""
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close(LinkClosed(f"{self._service} is stopping"))
        LINK_LOG.sum_up()

    def _forget(self, link: LinkHandler) -> None:
        with self._lock:
            self._links.pop(cast(Served, link), None)


def send(link: Link, message: WholeMessage, *, file: SealedFile | None = None) -> None:
    """Sends a whole message. Raises as Link.send does."""
    link.send(message.layout, message.buffers, Deadline.after(MESSAGE_S), file=file)
