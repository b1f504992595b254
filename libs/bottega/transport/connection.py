"""A link as a process uses it: one thread receives, another sends what any thread has put into the outbox.

A LinkHandler gives the messages their meaning; pings are answered here.
"""

from __future__ import annotations

import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bottega.errors import BadFrame, BottegaError, LinkError, NoSharedMemory, PeerDead, TooLarge
from bottega.transport.channel.buffers import Part
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.receiver import Incoming
from bottega.transport.keepalive import Keepalive
from bottega.transport.link import Link
from bottega.transport.memory.sealed_file import SealedFile
from bottega.transport.messages import WholeMessage, kind_of, number_message, read_number

_log = logging.getLogger(__name__)

# The most that waits to be sent: a worker has some tens of requests, with at most eight add-ons each.
MAX_OUTBOX = 4096
_PING, _PONG = "ping", "pong"

SendTask = Callable[[Link], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """here, peer: names of the two ends in texts, such as "the worker". silence_s: after which the peer is given up.
    send_s: for which it may let a message wait. receive_s: for which its own message may take to arrive; None: as long
    as bytes come. pings: whether this end sends pings, and so checks the link several times a second.
    """

    here: str
    peer: str
    silence_s: float
    send_s: float
    receive_s: float | None
    pings: bool


class LinkHandler(ABC):
    """One pair's messages and rules, at one end of its links."""

    def on_open(self, connection: Connection) -> None:  # noqa: B027 - a hook
        """The link is open, and nothing has come yet. By the thread that receives."""

    @abstractmethod
    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """A message has begun: wait for it by Connection.wait, and release it. By the thread that receives.

        Raises ValueError for one that breaks the rules, which ends the link.
        """

    def on_disconnect(self) -> None:  # noqa: B027 - a hook
        """The link has just ended; `on_end` follows when nothing is being sent. By the thread that receives."""

    @abstractmethod
    def on_end(self, cause: BottegaError) -> None:
        """The link has ended, or could not be opened; nothing is sent any more."""

    def check(self) -> None:  # noqa: B027 - a hook
        """Called while nothing comes. Raises LinkError to give up a peer that answers pings and does nothing else."""

    @property
    def progress(self) -> int:
        """A count that grows while this end works; answers to pings carry it."""
        return 0

    def on_pong(self, progress: int) -> None:  # noqa: B027 - a hook
        """The peer's count. By the thread that receives."""

    @property
    def idle_s(self) -> float | None:
        """How long the outbox must be empty for `send_idle` to be called; None: never. By the thread that sends."""
        return None

    def send_idle(self, link: Link) -> None:  # noqa: B027 - a hook
        """Sends what can wait. By the thread that sends."""


class Connection:
    """Any thread may call it. Messages may be sent before the link is open; they wait in the outbox."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        # SimpleQueue, because it wakes its reader quickest; None is the end.
        self._outbox: queue.SimpleQueue[SendTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._cause: LinkError | None = None
        self._keepalive: Keepalive | None = None
        self.link: Link | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a link that lives."""
        return self.link is not None and self.link.cause is None

    @property
    def cause(self) -> LinkError | None:
        """Why it was closed here, or what the link died of."""
        return self._cause or (self.link.cause if self.link is not None else None)

    def send(self, message: WholeMessage, *, on_failure: Callable[[BottegaError], None] | None = None) -> bool:
        """Puts a whole message into the outbox; returns False where the link has ended.

        on_failure: called when there is no memory for it, or it is too large for the peer; without it that ends the
        link.
        """

        def send(link: Link) -> None:
            try:
                self.send_now(link, message)
            except (NoSharedMemory, TooLarge) as error:  # nothing of it was sent, and the link lives
                if on_failure is None:
                    raise
                on_failure(error)

        return self.post(send)

    def post(self, task: SendTask) -> bool:
        """Puts a task for the thread that sends into the outbox; returns False where the link has ended. It runs even
        if the link ends before its turn, so that it frees what it holds."""
        with self._lock:
            if self._ended or self._cause is not None:
                return False
            if self._outbox.qsize() < MAX_OUTBOX:
                self._outbox.put(task)
                return True
        self.close(PeerDead(f"{self._settings.peer} reads nothing of what is sent to it"))
        return False

    def send_now(self, link: Link, message: WholeMessage, *, file: SealedFile | None = None) -> None:
        """Sends a whole message, by the thread that sends. Raises as Link.send does."""
        link.send(message.layout, message.buffers, Deadline.after(self._settings.send_s), file=file)

    def wait(self, incoming: Incoming, count: int) -> None:
        """Waits for the first `count` tensors of a message. Raises LinkError."""
        if self._settings.receive_s is not None:
            incoming.wait(count, Deadline.after(self._settings.receive_s))
        else:
            assert self._keepalive is not None, "a message has come"
            self._keepalive.wait(incoming, count)

    def wait_all(self, incoming: Incoming) -> list[memoryview]:
        """Waits for all of a message; its tensors, in memory of the host. Raises LinkError, ValueError."""
        count = len(incoming.layout.specs)
        self.wait(incoming, count)
        return [incoming.view(index) for index in range(count)]

    def wait_all_parts(self, incoming: Incoming) -> list[Part]:
        """Waits for all of a message; its tensors, where they lie. Raises LinkError."""
        count = len(incoming.layout.specs)
        self.wait(incoming, count)
        return [incoming.part(index) for index in range(count)]

    def close(self, cause: LinkError) -> None:
        """Ends it, without waiting; the peer is told."""
        with self._lock:
            self._cause = self._cause or cause
            link = self.link
        if link is not None:
            link.end(cause)

    def serve(self, link: Link, handler: LinkHandler) -> LinkError:
        """Receives from the link until it ends; returns why it did. The link is closed then."""
        with link:
            with self._lock:
                self.link, cause = link, self._cause
            if cause is not None:
                link.end(cause)
            sending = threading.Thread(target=self._send_all, args=(link, handler), name="link-sender", daemon=True)
            sending.start()
            with self._boundary(link):
                handler.on_open(self)
                self._receive(link, handler)
            handler.on_disconnect()
            with self._lock:
                self._ended = True
                self._outbox.put(None)
            sending.join()  # ends: the link is dead, and so is every wait in it
            assert link.cause is not None, "what ends the loop ends the link"
            return link.cause

    def _receive(self, link: Link, handler: LinkHandler) -> None:
        ping = (lambda: self.send(number_message(_PING))) if self._settings.pings else None
        keepalive = self._keepalive = Keepalive(
            link, peer=self._settings.peer, silence_s=self._settings.silence_s, ping=ping, check=handler.check
        )
        while True:
            incoming = keepalive.next()
            kind = kind_of(incoming.layout)
            if kind not in (_PING, _PONG):
                handler.on_message(self, incoming)
                continue
            with incoming:
                number = read_number(incoming.layout, self.wait_all(incoming))
            if kind == _PONG:
                handler.on_pong(number)
            else:
                self.send(number_message(_PONG, handler.progress))

    def _send_all(self, link: Link, handler: LinkHandler) -> None:
        while (task := self._next_task(link, handler)) is not None:
            with self._boundary(link):
                task(link)

    def _next_task(self, link: Link, handler: LinkHandler) -> SendTask | None:
        try:
            return self._outbox.get(timeout=handler.idle_s if link.cause is None else None)
        except queue.Empty:
            return handler.send_idle

    @contextmanager
    def _boundary(self, link: Link) -> Iterator[None]:
        """Where a fault on a link stops: it ends that link, and nothing else of its process."""
        here, peer = self._settings.here, self._settings.peer
        try:
            yield
        except LinkError as error:
            link.end(error)
        except ValueError as error:
            link.end(BadFrame(f"{peer} broke the rules of its messages: {error}"))
        except BottegaError as error:
            link.end(PeerDead(f"{here} could not go on with the link: {error.message}"))
        except Exception:  # noqa: BLE001 - the boundary of a link: a fault of ours ends this one only
            _log.exception("a link could not be served", extra={"link_id": link.link_id, "peer": peer})
            link.end(PeerDead(f"{here} could not serve the link"))
