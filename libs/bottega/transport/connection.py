"""A link as a process uses it: one thread receives, another sends what any thread has put into the outbox.

A LinkHandler handles the messages. This module answers pings. Where the peer must not fall silent, it is pinged when
nothing arrives, and finally given up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from bottega.clocks import AwakeClock
from bottega.errors import BadFrame, BottegaError, DeadlineExceeded, LinkError, NoSharedMemory, PeerDead, TooLarge
from bottega.transport.channel.backend import Deadline, Part
from bottega.transport.channel.receiver import Incoming
from bottega.transport.link import Link
from bottega.transport.memory import SealedFile
from bottega.transport.messages import WholeMessage, kind_of, number_message, read_number

_log = logging.getLogger(__name__)

# Maximum number of waiting messages. A worker has some tens of requests with at most eight add-ons each.
MAX_OUTBOX = 4096
_PING, _PONG = "ping", "pong"

SendTask = Callable[[Link], None]
# How often a quiet link is checked, by the end that pings and by one that only listens.
_CHECK_S = 0.25
_LISTENING_CHECK_S = 2.0
# A link is at rest if nothing but pings has been sent and received for so long, and no answer is pending. It is then
# checked after this share of silence_s: the peer has the rest of it to answer the ping.
_REST_AFTER_S = 10.0
_REST_CHECK_SHARE, _REST_LISTENING_CHECK_SHARE = 0.6, 0.3
# A peer is pinged after this share of silence_s without a message; the second one is for a link at rest.
_PING_SHARE = 0.2
_REST_PING_SHARE = 0.5
# A peer is pinged after this time in any case, and checked after the second one, because the other end gives up a peer
# that is silent for half a minute.
_PING_S, _MAX_CHECK_S = 5.0, 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """Names and timeouts of a connection."""

    here: str
    """Name of this process in texts, such as "the worker"."""
    peer: str
    """Name of the other process in texts."""
    silence_s: float
    """Seconds without a message after which the peer counts as dead."""
    send_s: float
    """Seconds in which the peer must receive a message."""
    receive_s: float | None
    """Seconds in which a message from the peer must arrive; None: as long as bytes keep arriving."""
    pings: bool
    """Whether this end sends pings. It then checks the link several times a second."""


class LinkHandler(ABC):
    """Handles the messages of one end of a link. Each pair of services has its own messages and rules."""

    def on_open(self, connection: Connection) -> None:  # noqa: B027 - a hook
        """Handle the opening of the link, before any message arrives. Called by the receiving thread."""

    @abstractmethod
    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Process a message that has begun to arrive. Called by the receiving thread.

        Wait for its tensors with Connection.wait, and release it. Raises ValueError for a message that breaks the
        rules, which ends the link.
        """

    def on_disconnect(self) -> None:  # noqa: B027 - a hook
        """Handle the end of the link, in the receiving thread. `on_end` follows when nothing is being sent."""

    @abstractmethod
    def on_end(self, cause: BottegaError) -> None:
        """Handle a link that has ended or could not be opened. Nothing is being sent any more."""

    def check(self) -> None:  # noqa: B027 - a hook
        """Check the peer while no message arrives. Raises LinkError if it answers pings but makes no progress."""

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer of the peer is pending. `check` is then called several times a second."""
        return False

    @property
    def progress(self) -> int:
        """A counter that rises while this end makes progress. Answers to pings contain it."""
        return 0

    def on_pong(self, progress: int) -> None:  # noqa: B027 - a hook
        """Record the peer's progress counter. Called by the receiving thread."""

    @property
    def idle_s(self) -> float | None:
        """Seconds for which the outbox must be empty before `send_idle` is called; None means never."""
        return None

    def send_idle(self, link: Link) -> None:  # noqa: B027 - a hook
        """Send low-priority messages. The sending thread calls this when it has nothing else to send."""


class Connection:
    """A link with an outbox. Any thread may call it; messages sent before the link is open wait in the outbox."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self._settings = settings
        # SimpleQueue wakes its reader fastest. None marks the end.
        self._outbox: queue.SimpleQueue[SendTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._cause: LinkError | None = None
        self._used_at = time.monotonic()
        self._keepalive: Keepalive | None = None
        self.link: Link | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a link that has not ended."""
        return self.link is not None and self.link.cause is None

    @property
    def cause(self) -> LinkError | None:
        """Why this process closed the connection, or why the link ended; None while it is open."""
        return self._cause or (self.link.cause if self.link is not None else None)

    def send(self, message: WholeMessage, *, on_failure: Callable[[BottegaError], None] | None = None) -> bool:
        """Put a whole message into the outbox. Return False if the link has ended.

        Args:
            on_failure: Called if there is no memory for the message or it is too large for the peer. If None, that ends
                the link.
        """

        def send(link: Link) -> None:
            try:
                self.send_now(link, message)
            except (NoSharedMemory, TooLarge) as error:  # nothing of the message was sent, and the link lives
                if on_failure is None:
                    raise
                on_failure(error)

        return self.post(send)

    def post(self, task: SendTask) -> bool:
        """Put a task for the sending thread into the outbox. Return False if the link has ended.

        The task runs even if the link ends before its turn, so that it can free what it holds.
        """
        self._used_at = time.monotonic()
        return self._enqueue(task)

    def _enqueue(self, task: SendTask) -> bool:
        with self._lock:
            if self._ended or self._cause is not None:
                return False
            if self._outbox.qsize() < MAX_OUTBOX:
                self._outbox.put(task)
                return True
        self.close(PeerDead(f"{self._settings.peer} does not read the messages that are sent to it"))
        return False

    def send_now(self, link: Link, message: WholeMessage, *, file: SealedFile | None = None) -> None:
        """Send a whole message. Only the sending thread may call it. Raises the errors of Link.send."""
        link.send(message.layout, message.buffers, Deadline.after(self._settings.send_s), file=file)

    def wait(self, incoming: Incoming, count: int, *, silence_s: float = 0.0) -> None:
        """Wait for the first `count` tensors of a message. Raises LinkError.

        Args:
            silence_s: How long the peer may be silent, if that is longer than usual: it cannot answer pings while it
                computes the tensors of a message that it has begun.
        """
        if self._settings.receive_s is not None:
            incoming.wait(count, Deadline.after(self._settings.receive_s))
        else:
            assert self._keepalive is not None, "a message has come"
            self._keepalive.wait(incoming, count, silence_s=silence_s)

    def wait_all(self, incoming: Incoming) -> list[memoryview]:
        """Wait for a whole message; return its tensors in host memory. Raises LinkError, ValueError."""
        count = len(incoming.layout.specs)
        self.wait(incoming, count)
        return [incoming.view(index) for index in range(count)]

    def wait_all_parts(self, incoming: Incoming) -> list[Part]:
        """Wait for a whole message; return its tensors in host or device memory. Raises LinkError."""
        count = len(incoming.layout.specs)
        self.wait(incoming, count)
        return [incoming.part(index) for index in range(count)]

    def close(self, cause: LinkError) -> None:
        """End the connection without waiting, and tell the peer."""
        with self._lock:
            self._cause = self._cause or cause
            link = self.link
        if link is not None:
            link.end(cause)

    def serve(self, link: Link, handler: LinkHandler) -> LinkError:
        """Receive from the link until it ends, close it, and return why it ended."""
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
            sending.join()  # it ends, because every wait on a dead link does
            assert link.cause is not None, "what ends the loop ends the link"
            return link.cause

    def _receive(self, link: Link, handler: LinkHandler) -> None:
        ping = (lambda: self._send_sign(number_message(_PING))) if self._settings.pings else None
        keepalive = self._keepalive = Keepalive(
            link,
            peer=self._settings.peer,
            silence_s=self._settings.silence_s,
            ping=ping,
            check=handler.check,
            is_at_rest=lambda: time.monotonic() - self._used_at > _REST_AFTER_S and not handler.awaits_answer,
        )
        while True:
            incoming = keepalive.next()
            kind = kind_of(incoming.layout)
            if kind not in (_PING, _PONG):
                self._used_at = time.monotonic()
                handler.on_message(self, incoming)
                continue
            with incoming:
                number = read_number(incoming.layout, self.wait_all(incoming))
            if kind == _PONG:
                handler.on_pong(number)
            else:
                self._send_sign(number_message(_PONG, handler.progress))

    def _send_sign(self, message: WholeMessage) -> None:
        """Put a ping, or the answer to one, into the outbox."""
        self._enqueue(lambda link: self.send_now(link, message))

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
        """Catch the errors of a link in the block, so that they end only this link, not the process."""
        here, peer = self._settings.here, self._settings.peer
        try:
            yield
        except LinkError as error:
            link.end(error)
        except ValueError as error:
            link.end(BadFrame(f"{peer} broke the rules of its messages: {error}"))
        except BottegaError as error:
            link.end(PeerDead(f"{here} had to end the link: {error.message}"))
        except Exception:  # noqa: BLE001 - the boundary of a link: a fault of ours ends this one only
            _log.exception("a link failed with an unexpected error", extra={"link_id": link.link_id, "peer": peer})
            link.end(PeerDead(f"{here} had to end the link because of an internal error"))


class Keepalive:
    """Receives messages and pings a silent peer. One thread uses it.

    Time during which this process itself was stopped does not count as silence of the peer.

    Args:
        peer: Its name in errors.
        silence_s: Seconds without a message after which the peer counts as dead.
        ping: Sends a ping; None if the peer sends something every few seconds anyway.
        check: Called while no message arrives. Raises to end the link although the peer answers pings.
        is_at_rest: Returns whether the link has carried only pings for a while, so that checks can be rarer.
    """

    def __init__(
        self,
        link: Link,
        *,
        peer: str,
        silence_s: float,
        ping: Callable[[], object] | None,
        check: Callable[[], None] = lambda: None,
        is_at_rest: Callable[[], bool] = lambda: False,
    ) -> None:
        self._link = link
        self._peer = peer
        self._silence_s = silence_s
        self._ping = ping
        self._check = check
        self._is_at_rest = is_at_rest
        self._check_s = _LISTENING_CHECK_S if ping is None else _CHECK_S
        share = _REST_LISTENING_CHECK_SHARE if ping is None else _REST_CHECK_SHARE
        self._rest_check_s = max(self._check_s, min(share * silence_s, _MAX_CHECK_S if ping else silence_s))
        self._awake = AwakeClock(self._check_s)
        self._last_s = self._pinged_s = self._awake()

    def next(self) -> Incoming:
        """Return the next message.

        Raises DeadlineExceeded if the peer has been silent for too long, and the errors of `check` and Link.recv.
        """
        while True:
            try:
                self._awake.every_s = self._rest_check_s if self._is_at_rest() else self._check_s
                incoming = self._link.recv(Deadline.after(min(self._awake.every_s, self._left_s())))
            except DeadlineExceeded as error:
                self._check_silence(error, self._silence_s)
            else:
                self._last_s = self._awake()
                return incoming

    def wait(self, incoming: Incoming, count: int, *, silence_s: float = 0.0) -> None:
        """Wait for the first `count` tensors of a message while bytes keep arriving. Raises the errors of `next`.

        Args:
            silence_s: See `Connection.wait`.
        """
        while True:
            filled = incoming.filled
            try:
                incoming.wait(count, Deadline.after(self._check_s))
                break
            except DeadlineExceeded as error:
                if incoming.filled == filled:
                    self._check_silence(error, max(silence_s, self._silence_s))
                else:
                    self._last_s = self._awake()
        self._last_s = self._awake()

    def _left_s(self) -> float:
        """Return the seconds until the peer has been silent for too long, but at least the time of a usual check."""
        return max(self._check_s, self._silence_s - (self._awake() - self._last_s))

    def _check_silence(self, error: DeadlineExceeded, silence_s: float) -> None:
        """Ping a quiet peer, or raise if it has been silent for too long."""
        if self._link.cause is not None:
            raise self._link.cause
        now_s = self._awake()
        quiet_s = now_s - self._last_s
        if quiet_s > silence_s:
            raise DeadlineExceeded(f"{self._peer} was silent for {quiet_s:.1f} s: stopped or unreachable") from error
        self._check()
        quiet_since_s = max(self._last_s, self._pinged_s)
        share = _REST_PING_SHARE if self._is_at_rest() else _PING_SHARE
        if self._ping is not None and now_s - quiet_since_s > min(share * self._silence_s, _PING_S):
            self._pinged_s = now_s
            self._ping()
