"""The base of services that are a store: it offers tensor links to workers, reports to the fleet, and measures memory.

`boot_store` runs such a service as a process.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bottega.errors import Draining, NoSharedMemory, TooLarge
from bottega.process.memory import MemoryMeter
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.fleet_membership import FleetMembership, Listening, registration_of
from bottega.rpc.link_service import add_link_service
from bottega.rpc.operation.metrics import link_counts, link_metrics
from bottega.rpc.server import Server
from bottega.rpc.server_config import StoreConfig
from bottega.state_folder import state_folder
from bottega.transport import Connection, Link, LinkHandler, LinkServer, WholeMessage, offer_to_wire
from bottega.v1 import fleet_pb2
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest

HandlerT = TypeVar("HandlerT", bound=LinkHandler)
ConfigT = TypeVar("ConfigT", bound=StoreConfig)

# Upper bound on the unsent answers to one worker, which has some tens of jobs that ask one question each.
_MOST_UNSENT = 64


class StoreLinkHandler(LinkHandler):
    """A store's side of the link to one worker. A worker that does not read its answers gets only refusals."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._unsent = 0
        self._counting = threading.Lock()

    def _send_answer(self, answer: Callable[[], WholeMessage], refusal: WholeMessage) -> None:
        """Queue an answer to be sent.

        Args:
            answer: Creates the answer. It is not called if too many answers wait to be sent.
            refusal: Sent instead in that case, or if the answer is too large.
        """
        with self._counting:
            self._unsent += 1
            busy = self._unsent > _MOST_UNSENT
        queued = False
        try:
            message = refusal if busy else answer()
            queued = self._connection.post(lambda link: self._send(link, message, refusal))
        finally:
            if not queued:
                self._sent()

    def _send(self, link: Link, message: WholeMessage, refusal: WholeMessage) -> None:
        try:
            self._connection.send_now(link, message)
        except (NoSharedMemory, TooLarge):  # nothing was sent, and the link can be used further
            self._connection.send_now(link, refusal)
        finally:
            self._sent()

    def _sent(self) -> None:
        with self._counting:
            self._unsent -= 1


class StoreServer(Collector):
    """The server of a store, and the collector of its metrics. A subclass owns the store.

    Call `start` first, and `drain` and `stop` at the end.

    Args:
        kind: The service's kind in the fleet, see bottega.kinds.
        what: Name of the service in refusals, such as "the activation store".
        uses: Kinds of the services that `on_services` is told of.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        kind: str,
        what: str,
        listening: Listening,
        links: LinkServer[Any],
        uses: Sequence[str] = (),
    ) -> None:
        self.name = config.name or f"{kind}-{os.getpid()}"
        self._kind = kind
        self._what = what
        self._uses = uses
        self._gateway = config.gateway
        self._listening = listening
        self._links = links
        self._membership: FleetMembership | None = None
        self._memory = MemoryMeter(lambda: [os.getpid()])
        self._draining = False

    async def start(self) -> None:
        """Open the store and join the fleet.

        Raises ConfigError if the store cannot be opened, StorageUnavailable, DataLoss, and Unavailable if another
        process uses the folder.
        """
        await self._open()
        if self._gateway:
            registration = registration_of(self._listening, kind=self._kind, name=self.name)
            registration.uses.extend(self._uses)
            self._membership = FleetMembership(
                self._gateway,
                registration,
                load=self.load,
                on_services=self.on_services,
                channels=self._listening.channels,
            )
            self._membership.start()

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return the offer of a link for a worker on host `caller`. Raises Draining, LinksFull, InvalidRequest."""
        if self._draining:
            raise Draining(f"{self._what} is stopping")
        return offer_to_wire(self._links.offer(request.worker, request.link_id, caller=caller))

    @abc.abstractmethod
    def load(self) -> fleet_pb2.Load:
        """Return the load to report to the fleet."""

    def on_services(self, services: Sequence[fleet_pb2.ServiceAddress]) -> None:
        """Note the services of the kinds in `uses`, at most 8 of a kind. Called at every response of a gateway."""

    async def drain(self) -> None:
        """Refuse new links."""
        self._draining = True
        self._links.drain()
        if self._membership:
            self._membership.report_soon()

    async def stop(self) -> None:
        """Leave the fleet, end all links, and close the store."""
        if self._membership:
            await self._membership.stop()
        await asyncio.to_thread(self._links.close)
        await self._close()

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics. Any thread may call it."""
        yield from link_metrics(link_counts(self._links.counters, open_links=len(self._links.handlers)))
        yield from self._metrics()

    @abc.abstractmethod
    async def _open(self) -> None:
        """Open the store."""

    @abc.abstractmethod
    async def _close(self) -> None:
        """Write pending changes, and close the store."""

    @abc.abstractmethod
    def _metrics(self) -> Iterator[Metric]:
        """Yield the store's metrics. Called in another thread."""


def add_store(server: Server, kind: str, store: StoreServer, *, service: str) -> None:
    """Add a store's metrics and links to its gRPC server.

    Args:
        service: Name of the store's own gRPC service, which the caller has added.
    """
    server.registry.register(store)
    server.add_services([service])
    add_link_service(server, kind, store)


def boot_store(
    kind: str,
    config: type[ConfigT],
    build: Callable[[ConfigT, Path], tuple[Server, StoreServer]],
    *,
    description: str,
) -> int:
    """Run a store as a process and return the exit status; see `boot`.

    Args:
        build: Creates the server and its store from a configuration and a folder, without starting them. Called in the
            event loop.
    """

    @contextlib.asynccontextmanager
    async def lifespan(settings: ConfigT) -> AsyncIterator[ServiceHooks]:
        folder = Path(settings.folder) if settings.folder else state_folder() / kind
        server, store = build(settings, folder)
        yield ServiceHooks(server=server, warm_up=store.start, finish=store.drain, shut_down=store.stop)

    return boot(kind, config, lifespan, description=description)
