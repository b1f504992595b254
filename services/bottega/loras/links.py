"""The links of the store: offers them, keeps those that are open. Knows no wire."""

from __future__ import annotations

import os
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from bottega.errors import Draining, LinkClosed, TooLarge
from bottega.loras.config import LinksConfig
from bottega.loras.tiers import Tiers
from bottega.loras.worker_link import WorkerLink
from bottega.rpc.address import split
from bottega.transport import Counters, Doors, Limits, Listener, Offer, TcpEndpoint

# Of workers: each has one link.
_MOST_LINKS = 256
# What workers say is short; what they are sent, their own limits bound.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)
_TOKEN_S = 10.0
# Workers may be other users: the socket's folder decides who finds it, and an offer's token who gets in.
_SOCKET_MODE = 0o666
# The folder that systemd makes for a unit's sockets, which other units can see.
_RUNTIME_VARIABLE = "RUNTIME_DIRECTORY"


class Links:
    """Raises ConfigError when an address cannot be bound. Any thread may call it."""

    def __init__(self, config: LinksConfig, *, tiers: Tiers) -> None:
        self.counters = Counters()
        self._tiers = tiers
        self._bytes_per_s = config.bytes_per_s
        self._links: set[WorkerLink] = set()
        self._lock = threading.Lock()
        self._draining = False
        self._advertised = _endpoint(config.advertised) if config.advertised else None
        self._listener = Listener(_doors(config), limits=_LIMITS, counters=self.counters, token_s=_TOKEN_S)

    @property
    def open(self) -> int:
        """How many there are."""
        return len(self._links)

    def offer(self, worker: str, link_id: str) -> Offer:
        """An offer for a worker. Raises Draining, TooLarge, InvalidRequest for what is no name of a link."""
        with self._lock:
            if self._draining:
                raise Draining("the LoRA store is stopping")
            if len(self._links) >= _MOST_LINKS:
                raise TooLarge(f"{_MOST_LINKS} workers are linked, as many as may be", metadata={"limit": "links"})
        offer = self._listener.offer(link_id or None)
        link = WorkerLink(
            self._listener,
            offer,
            worker=worker,
            tiers=self._tiers,
            bytes_per_s=self._bytes_per_s,
            on_end=self._ended,
        )
        with self._lock:
            self._links.add(link)
        link.start()
        return offer if self._advertised is None else replace(offer, tcp=self._advertised)

    def drain(self) -> None:
        """No offers from now on; what is being sent is sent."""
        with self._lock:
            self._draining = True

    def close(self) -> None:
        """Ends all links. It may wait for what is being sent to end."""
        self._listener.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close(LinkClosed("the LoRA store is stopping"))

    def _ended(self, link: WorkerLink) -> None:
        with self._lock:
            self._links.discard(link)


def _endpoint(address: str) -> TcpEndpoint:
    host, port = split(address)
    return TcpEndpoint(host=host, port=port)


def _doors(config: LinksConfig) -> Doors:
    tcp = split(config.listen) if config.listen else None
    return Doors(tcp=tcp, unix_path=_socket(config.socket), unix_mode=_SOCKET_MODE)


def _socket(configured: str | None) -> Path | None:
    if configured is None or configured:
        return Path(configured) if configured else None
    if given := os.environ.get(_RUNTIME_VARIABLE, "").partition(":")[0]:
        return Path(given) / "links.sock"
    folder = Path(tempfile.gettempdir()) / f"bottega-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder / f"loras-{os.getpid()}.sock"
