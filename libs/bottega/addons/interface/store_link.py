"""The connection of a worker's engine to one store or server, and the choice among several, for all add-ons."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from bottega.errors import BottegaError
from bottega.transport import Connection, LinkClient, LinkClientHandler, LinkClientSettings, LinkCounters, OfferSource

_log = logging.getLogger(__name__)


MAX_SERVICES = 8
"""Upper bound on the services of one kind that a gateway names to a worker. More stores of a kind have no share."""


class LinkedService(Protocol):
    """The name and address of a service, as ServiceAddress and ControlServer have them."""

    @property
    def name(self) -> str: ...

    @property
    def address(self) -> str: ...


class StoreLink(LinkClientHandler):
    """A connection to one service, opened again after each loss. Any thread may call it.

    Subclasses handle messages, and call `on_open` and `on_end` of this class in their own.

    Args:
        store: The service at the other end.
        kind: Its kind, see bottega.kinds.
        title: What the service is, in texts, with its article: "a LoRA store".
        link_id: ID of the connection that it replaces.
        terms: Properties that the service must have; see `OfferSource.request`.
    """

    def __init__(
        self,
        store: LinkedService,
        *,
        kind: str,
        title: str,
        offers: OfferSource,
        settings: LinkClientSettings,
        counters: LinkCounters,
        link_id: str = "",
        terms: Mapping[str, str] | None = None,
    ) -> None:
        self.store = store
        self._title = title
        self._connection: Connection | None = None
        self._loss_logged = False
        self._client = LinkClient(
            self,
            peer=f"{title.partition(' ')[2]} {store.name}",
            request=lambda link_id: offers.request(kind, store.address, link_id, terms),
            settings=settings,
            counters=counters,
            link_id=link_id,
        )

    @property
    def open(self) -> bool:
        """Whether the connection is open."""
        return self._connection is not None

    @property
    def wants_link(self) -> bool:
        """Always True, because the connection is only closed when its service leaves the fleet."""
        return True

    def start(self) -> None:
        """Open the connection in the background."""
        self._client.start()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def on_open(self, connection: Connection) -> None:
        """Log over which transport the connection runs."""
        self._connection, self._loss_logged = connection, False
        assert connection.link is not None
        choice = connection.link.backend_choice
        facts = {"service": self.store.name, "backend": choice.backend, "why": choice.reason}
        _log.info(f"linked to {self._title}", extra=facts)

    def on_end(self, cause: BottegaError) -> None:
        """Log the loss once, however often the connection is tried again."""
        self._connection = None
        if not self._loss_logged:
            self._loss_logged = True
            _log.warning(f"{self._title} is lost", extra={"service": self.store.name, "text": cause.message})


LinkT = TypeVar("LinkT", bound=StoreLink)
ServiceT = TypeVar("ServiceT", bound=LinkedService)


def renew_links(
    links: Mapping[str, LinkT], stores: Sequence[ServiceT], open_link: Callable[[ServiceT], LinkT]
) -> tuple[dict[str, LinkT], list[LinkT]]:
    """Return a link to each of the stores, by name, and the links to close.

    Args:
        links: The links so far, by name. A link is kept if the address of its store has not changed.
        stores: The stores to be linked.
        open_link: Opens the link to a store.
    """
    kept = {
        store.name: links[store.name]
        for store in stores
        if store.name in links and links[store.name].store.address == store.address
    }
    renewed = {store.name: kept.get(store.name) or open_link(store) for store in stores}
    return renewed, [link for name, link in links.items() if name not in kept]


def rank_stores(names: Iterable[str], key: str) -> list[str]:
    """Return the names of stores in the order in which they are responsible for the items of a key.

    The order is the same in every process. A store that leaves only passes on its own keys, each to the next one in its
    order, and a store that joins only takes over the keys that it is the first for. Source: rendezvous hashing (Thaler
    and Ravishankar, 1998).
    """
    return sorted(names, key=lambda name: (hashlib.sha256(f"{name}\0{key}".encode()).digest(), name), reverse=True)
