"""The client of links: it opens a link to a service, and opens it again (in the next epoch) when it is lost."""

from __future__ import annotations

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from bottega.errors import (
    AuthFailed,
    BottegaError,
    EngineStarting,
    LinkClosed,
    LinkError,
    LinksFull,
    PeerDead,
    Unavailable,
)
from bottega.transport.channel.backend import Deadline, DeviceLinks, Limits
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.connection import Connection, ConnectionSettings, LinkHandler
from bottega.transport.handshake.connector import connect
from bottega.transport.handshake.messages import Offer
from bottega.transport.link import Link

_log = logging.getLogger(__name__)

# Pause before a new offer is requested after one that could not be used, if the service gives no retry time.
_OFFER_RETRY_S = 0.5
# Seconds for which `join` lets the thread send the end of the link. The service notices a closed connection anyway.
_END_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOffer:
    """An offer of a link, and the service that made it."""

    offer: Offer
    service: str
    """Name of the service that made the offer."""


class OfferSource(Protocol):
    """Requests offers of links from other services."""

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        """Request an offer from the service of that kind at host:port. The future fails with a BottegaError.

        Args:
            link_id: ID of the lost link that is replaced, or "".
            terms: Properties that the service must have, such as the model's hash, by name.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClientSettings:
    """Timeouts and limits of a LinkClient."""

    silence_s: float = 5.0
    """Seconds without a message after which a service counts as dead."""
    limits: Limits = field(default_factory=Limits)
    """Limits on the messages that the service sends."""
    send_s: float | None = None
    """Seconds in which the service must receive a message; None means silence_s."""
    connect_s: float = 5.0
    """Seconds for offer and connection together. A healthy service takes milliseconds."""
    start_s: float = 120.0
    """Seconds to wait while the service reports that it is starting its engine."""
    retry_s: float = 0.5
    """Seconds between two attempts to reach a service."""
    devices: DeviceLinks | None = None
    """The device of this process, if links may use it; else None."""


class LinkClientHandler(LinkHandler):
    """The callbacks of a LinkClient: whether a link is wanted, and the handling of messages."""

    @property
    @abstractmethod
    def wants_link(self) -> bool:
        """Whether there should be a link. Must not wait. After a change to True, call LinkClient.wake."""


class LinkClient:
    """Opens a link whenever its handler wants one and there is none.

    Args:
        peer: Name of the service in texts.
        request: Requests an offer. It gets the ID of the link that the new one replaces.
        link_id: ID of a link that an earlier client had, or "".
    """

    def __init__(
        self,
        handler: LinkClientHandler,
        *,
        peer: str,
        request: Callable[[str], Future[ServiceOffer]],
        settings: LinkClientSettings,
        counters: LinkCounters,
        link_id: str = "",
    ) -> None:
        self.link_id = link_id
        self.service = ""
        self._handler = handler
        self._peer = peer
        self._request = request
        self._settings = settings
        self._counters = counters
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self.connection = self._new_connection()
        self._thread = threading.Thread(target=self._run, name="link-client", daemon=True)

    def start(self) -> None:
        """Start to open links in the background."""
        self._thread.start()

    def wake(self) -> None:
        """Check again whether a link is wanted."""
        with self._changed:
            self._changed.notify_all()

    def close(self, cause: LinkError | None = None) -> None:
        """End the link, tell the service, and open no other link."""
        self._stopped.set()
        self.wake()
        self.connection.close(cause or LinkClosed("the worker is stopping"))

    def join(self) -> None:
        """Wait briefly for the end of the link after `close`."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_END_S)

    def _new_connection(self) -> Connection:
        silence_s, send_s = self._settings.silence_s, self._settings.send_s
        return Connection(
            ConnectionSettings(
                here="the worker",
                peer=self._peer,
                silence_s=silence_s,
                send_s=silence_s if send_s is None else send_s,
                receive_s=None,
                pings=True,
            )
        )

    def _run(self) -> None:
        while self._wait_until_wanted():
            cause = self._serve_once()
            self._handler.on_end(cause)
            if not self._stopped.wait(self._settings.retry_s):
                self.connection = self._new_connection()

    def _wait_until_wanted(self) -> bool:
        """Wait until a link is wanted; return False when the client is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped.is_set() or self._handler.wants_link)
        return not self._stopped.is_set()

    def _serve_once(self) -> BottegaError:
        """Open a link and serve it to its end; return why it ended or could not be opened."""
        try:
            link = self._open(Deadline.after(self._settings.connect_s))
        except TimeoutError:
            return Unavailable(f"{self._peer} made no offer within {self._settings.connect_s:g} s")
        except BottegaError as error:
            return error
        except Exception:  # noqa: BLE001 - the boundary of a link: a fault of ours loses this one only
            _log.exception("a link could not be opened", extra={"peer": self._peer})
            return PeerDead("the worker could not open the link")
        return self.connection.serve(link, self._handler)

    def _open(self, deadline: Deadline) -> Link:
        """Open a link. Retry until the deadline if the service has too many links, or its engine is starting.

        Args:
            deadline: For offer and connection, from the moment at which the service's engine has started.
        """
        starting = Deadline.after(self._settings.start_s)
        while True:
            try:
                offered = self._request(self.link_id).result(deadline.left_s())
                link = connect(
                    offered.offer,
                    deadline,
                    limits=self._settings.limits,
                    counters=self._counters,
                    devices=self._settings.devices,
                )
            except (LinksFull, AuthFailed) as error:  # the offer may have been dropped for others before its use
                wait_s = error.retry_after_s or _OFFER_RETRY_S
                if self.connection.cause is not None or deadline.left_s() <= wait_s:
                    raise
                time.sleep(wait_s)
            except EngineStarting as error:
                wait_s = error.retry_after_s or _OFFER_RETRY_S
                if self._stopped.wait(wait_s) or self.connection.cause is not None or starting.left_s() <= wait_s:
                    raise
                deadline = Deadline.after(self._settings.connect_s)
            else:
                self.link_id, self.service = link.link_id, offered.service
                return link
