"""The links of the engine: offers them, keeps those that are open, counts what they hold together. Knows no wire."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

from bottega.controlnet.config import EngineConfig
from bottega.controlnet.forwards import Forwards
from bottega.controlnet.hosts import Hosts
from bottega.controlnet.worker_link import WorkerLink
from bottega.errors import Draining, InvalidRequest, TooLarge, Violation
from bottega.rpc.address import split
from bottega.transport import Counters, Doors, Limits, Listener, Offer, TcpEndpoint

# Of workers: each has one link.
_MOST_LINKS = 256
# Taken only as messages need it: eight control images of four megapixels are 96 MiB.
_LIMITS = Limits(slots=8, slot_bytes=128 << 20)
_TOKEN_S = 10.0
# Workers may be other users: the socket's folder decides who finds it, and an offer's token who gets in.
_SOCKET_MODE = 0o666


class Links:
    """Raises ConfigError when an address cannot be bound. Any thread may call it."""

    def __init__(self, config: EngineConfig, *, hosts: Hosts, forwards: Forwards) -> None:
        self.counters = Counters()
        self._hosts = hosts
        self._forwards = forwards
        self._links: set[WorkerLink] = set()
        self._lock = threading.Lock()
        self._draining = False
        self._advertised = _endpoint(config.links_advertised) if config.links_advertised else None
        self._listener = Listener(_doors(config), limits=_LIMITS, counters=self.counters, token_s=_TOKEN_S)

    @property
    def open(self) -> int:
        """How many there are."""
        return len(self._links)

    @property
    def sessions(self) -> Counter[str]:
        """Sessions of all links, by ControlNet."""
        with self._lock:
            links = list(self._links)
        return sum((link.sessions for link in links), Counter[str]())

    def offer(self, worker: str, link_id: str) -> Offer:
        """An offer for a worker. Raises Draining, TooLarge, InvalidRequest for what is no name of a link."""
        with self._lock:
            if self._draining:
                raise Draining("the ControlNet server is stopping")
            if len(self._links) >= _MOST_LINKS:
                raise TooLarge(f"{_MOST_LINKS} workers are linked, as many as may be", metadata={"limit": "links"})
        try:
            offer = self._listener.offer(link_id or None)
        except ValueError as error:
            violation = Violation(field="link_id", description=str(error))
            raise InvalidRequest(f"link_id: {error}", violations=[violation]) from None
        link = WorkerLink(
            self._listener,
            offer,
            worker=worker,
            hosts=self._hosts,
            forwards=self._forwards,
            on_end=self._ended,
        )
        with self._lock:
            link.draining = self._draining
            self._links.add(link)
        link.start()
        return offer if self._advertised is None else replace(offer, tcp=self._advertised)

    def drain(self) -> None:
        """No offers, and no sessions, from now on."""
        with self._lock:
            self._draining = True
            for link in self._links:
                link.draining = True

    def close(self) -> None:
        """Takes no links any more."""
        self._listener.close()

    def _ended(self, link: WorkerLink) -> None:
        with self._lock:
            self._links.discard(link)


def _endpoint(address: str) -> TcpEndpoint:
    host, port = split(address)
    return TcpEndpoint(host=host, port=port)


def _doors(config: EngineConfig) -> Doors:
    tcp = split(config.links_listen) if config.links_listen else None
    unix_path = Path(config.links_socket) if config.links_socket else None
    return Doors(tcp=tcp, unix_path=unix_path, unix_mode=_SOCKET_MODE)
