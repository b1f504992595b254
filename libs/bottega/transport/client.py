"""The client of links: opens a link to a service, and opens it again with the next epoch when it is lost."""

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
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.device_links import DeviceLinks
from bottega.transport.channel.limits import Limits
from bottega.transport.connection import Connection, ConnectionSettings, LinkHandler
from bottega.transport.handshake.connector import connect
from bottega.transport.handshake.offer import Offer
from bottega.transport.link import Link

_log = logging.getLogger(__name__)

# Until a new offer is requested after one that could not be used, where the service does not say when.
_OFFER_RETRY_S = 0.5
# For the thread to send the end of the link; without it the service notices that the connection is gone.
_END_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOffer:
    """An offer of a link. service: name of the service that made it."""

    offer: Offer
    service: str


class OfferSource(Protocol):
    """Gets offers of links from other services."""

    def request(
        self, kind: str, address: str, link_id: str, terms: Mapping[str, str] | None = None
    ) -> Future[ServiceOffer]:
        """An offer of the service of that kind at host:port.

        link_id: of the lost link that it replaces, or empty. terms: what the service must agree to, by name. The
        future fails with a BottegaError.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClientSettings:
    """silence_s: after which a service is taken for dead. limits: of what comes in. send_s: for which the service may
    let a message wait; None: silence_s.

    connect_s: for offer and connection; a service that lives takes milliseconds. start_s: for a service that says that
    it is starting the engine at which its links end. retry_s: between two attempts at a
    service that cannot be reached. devices: of this process, where its links may be between devices.
    """

    silence_s: float = 5.0
    limits: Limits = field(default_factory=Limits)
    send_s: float | None = None
    connect_s: float = 5.0
    start_s: float = 120.0
    retry_s: float = 0.5
    devices: DeviceLinks | None = None


class LinkClientHandler(LinkHandler):
    """The messages and rules of a pair, at its client."""

    @property
    @abstractmethod
    def wants_link(self) -> bool:
        """Whether there should be a link; after a change to True, call LinkClient.wake. It must not wait."""


class LinkClient:
    """`start` it; it opens a link whenever its handler wants one and there is none.

    peer: name of the service in texts. request: requests an offer, given the id of the link that it replaces. link_id:
    of a link that another client had before.
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
        """Opens links in the background from now on."""
        self._thread.start()

    def wake(self) -> None:
        """Checks again whether a link is wanted."""
        with self._changed:
            self._changed.notify_all()

    def close(self, cause: LinkError | None = None) -> None:
        """Ends the link, of which the service is told, and opens no other one."""
        self._stopped.set()
        self.wake()
        self.connection.close(cause or LinkClosed("the worker is stopping"))

    def join(self) -> None:
        """Waits for the end of the link after `close`, for a moment at most."""
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
        """False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped.is_set() or self._handler.wants_link)
        return not self._stopped.is_set()

    def _serve_once(self) -> BottegaError:
        """Opens a link and serves it to its end; returns why it ended, or why it could not be opened."""
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
        """Open a link. A service is asked again while there is time: room becomes free, and an engine starts.

        deadline: of offer and connection, from the moment at which the service has what its links end at.
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
            except (LinksFull, AuthFailed) as error:  # the offer may have been given up for others' before it was used
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
