"""The server of links: it offers links to workers, serves those that workers open, and ends them together."""

from __future__ import annotations

import logging
import random
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from bottega.errors import Draining, LinkClosed, LinkError, LinksFull
from bottega.sampled_log import SampledLog
from bottega.transport.channel.backend import Deadline, DeviceLinks, Limits
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.connection import Connection, ConnectionSettings, LinkHandler
from bottega.transport.handshake.binding import Endpoints
from bottega.transport.handshake.listener import LinkListener
from bottega.transport.handshake.messages import Offer, TcpEndpoint

# Seconds for the rest of a message that has begun to arrive, and for a worker to read an answer.
MESSAGE_S = 20.0
# A worker uses an offer at once, or not at all.
_TOKEN_S = 5.0
# Longer than an offer lives, so the listener ends the wait.
_ACCEPT_S = 2 * _TOKEN_S
# Seconds of silence: a worker sends a ping every few seconds (Keepalive), or it has ended.
_SILENCE_S = 30.0
# Each worker has one link. The listener bounds unused offers.
_MAX_LINKS = 256
# Upper bound per host. Most suites run all their workers on a few hosts; some links are left for another host.
_MAX_LINKS_PER_HOST = 192
# A link may end at any moment. The spread keeps refused workers from returning together.
_RETRY_S = (0.5, 1.5)

_log = logging.getLogger(__name__)
# Sampled, because any process that may request offers could cause any number of these lines.
_NOT_USED = SampledLog(
    _log, "an offer of a link was not used", more="more offers of links were not used", counted="offers"
)
_LINKED = SampledLog(_log, "a worker has opened a link", more="more links were opened", counted="links")
_ENDED = SampledLog(_log, "a worker's link has ended", more="more links have ended", counted="links")

H = TypeVar("H", bound=LinkHandler)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkServerSettings:
    """Limits and timeouts of a LinkServer."""

    limits: Limits
    """Limits on the messages that workers send."""
    send_s: float = MESSAGE_S
    """Seconds in which a worker must receive a message."""
    receive_s: float = MESSAGE_S
    """Seconds in which a message from a worker must arrive, once it has begun."""
    max_links: int = _MAX_LINKS
    """Upper bound on open links."""
    max_links_per_host: int = _MAX_LINKS_PER_HOST
    """Upper bound on open links with one host."""
    devices: DeviceLinks | None = None
    """The device of this process, if links may use it; else None."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _OpenLink(Generic[H]):
    connection: Connection
    handler: H
    caller: str
    """Host of the worker."""
    thread: threading.Thread


class LinkServer(ABC, Generic[H]):
    """Serves links. Any thread may call it.

    Args:
        service: Name of this process in texts.
        peer: Name of the other process in texts.
        counters: Counters of all links.
        advertised: Address that offers contain instead of the listener's own; None for the listener's.

    Raises ConfigError if an address cannot be bound.
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        service: str,
        peer: str = "the worker",
        settings: LinkServerSettings,
        counters: LinkCounters | None = None,
        advertised: TcpEndpoint | None = None,
    ) -> None:
        self.counters = counters or LinkCounters()
        self.draining = False
        self._listener = LinkListener(
            endpoints, limits=settings.limits, counters=self.counters, token_s=_TOKEN_S, devices=settings.devices
        )
        self._service = service
        self._peer = peer
        self._settings = settings
        self._advertised = advertised
        self._open: list[_OpenLink[H]] = []
        self._closed = False
        self._lock = threading.Lock()

    @abstractmethod
    def new_handler(self, connection: Connection) -> H:
        """Return the handler that serves one link."""

    @property
    def handlers(self) -> list[H]:
        """Handlers of the open links."""
        with self._lock:
            return [link.handler for link in self._open]

    def offer(self, worker: str, link_id: str, *, caller: str) -> Offer:
        """Return an offer for a worker.

        Args:
            link_id: ID of the link that the new one replaces, or "".
            caller: Host of the worker.

        Raises Draining, LinksFull, or InvalidRequest for a malformed link_id.
        """
        if self.draining:
            raise Draining(f"{self._service} is stopping")
        self._check_room(caller)
        offer = self._listener.offer(link_id or None, caller=caller)
        name = f"link-{offer.link_id[:8]}"
        threading.Thread(target=self._serve, args=(offer, worker, caller), name=name, daemon=True).start()
        return offer if self._advertised is None else replace(offer, tcp=self._advertised)

    def drain(self) -> None:
        """Make no more offers."""
        self.draining = True

    def close(self) -> None:
        """Open no more links, and end the open ones. May wait for messages that are being sent."""
        self._listener.close()
        with self._lock:
            self._closed = True
            links = list(self._open)
        for link in links:
            link.connection.close(self._stopping())
        for link in links:
            link.thread.join(self._settings.send_s)
        sum_up_logs()

    def _check_room(self, caller: str) -> None:
        """Raise LinksFull if there are too many links, in total or with one host."""
        with self._lock:
            callers = [link.caller for link in self._open]
        for count, most, whose in (
            (len(callers), self._settings.max_links, "workers"),
            (callers.count(caller), self._settings.max_links_per_host, "workers of your host"),
        ):
            if count >= most:
                raise LinksFull(
                    f"{self._service} has links with {most} {whose}, as many as it may",
                    metadata={"limit": "links"},
                    retry_after_s=random.uniform(*_RETRY_S),
                )

    def _serve(self, offer: Offer, worker: str, caller: str) -> None:
        """Wait for the worker to use the offer, and serve the link to its end. Runs in a thread of its own."""
        facts = {"service": self._service, "worker": worker}
        try:
            link = self._listener.accept(offer, Deadline.after(_ACCEPT_S))
        except LinkError as error:
            _NOT_USED.log_event(details={**facts, "text": error.message})
            return
        connection = Connection(
            ConnectionSettings(
                here=self._service,
                peer=self._peer,
                silence_s=_SILENCE_S,
                send_s=self._settings.send_s,
                receive_s=self._settings.receive_s,
                pings=False,
            )
        )
        handler = self.new_handler(connection)
        served = _OpenLink(connection=connection, handler=handler, caller=caller, thread=threading.current_thread())
        with self._lock:
            self._open.append(served)
            closed = self._closed
        if closed:
            connection.close(self._stopping())
        _LINKED.log_event({"backend": link.backend_choice.backend}, facts)
        cause = connection.serve(link, handler)
        handler.on_end(cause)
        with self._lock:
            self._open.remove(served)
        _ENDED.log_event({"cause": type(cause).__name__}, {**facts, "text": cause.message})

    def _stopping(self) -> LinkClosed:
        return LinkClosed(f"{self._service} is stopping")


def sum_up_logs() -> None:
    """Log how many log lines about links were not logged, because they are sampled."""
    for lines in (_NOT_USED, _LINKED, _ENDED):
        lines.sum_up()
