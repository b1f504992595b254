"""A service that has a store: it offers links to workers, reports to the fleet, and measures its memory."""

from __future__ import annotations

import abc
import asyncio
import importlib.metadata
import os
from typing import Any

from bottega.background_tasks import BackgroundTasks
from bottega.errors import Draining
from bottega.process.memory import MemoryMeter
from bottega.rpc.fleet_membership import FleetMembership, Listening
from bottega.rpc.operation.link_metrics import link_counts
from bottega.transport import LinkServer, offer_to_wire
from bottega.v1 import fleet_pb2
from bottega.v1.link_pb2 import LinkCounts, LinkOffer, OpenLinkRequest


class StoreServer(abc.ABC):
    """The server of a store. Start it with `start`, end it with `drain` and `stop`. A subclass owns the store.

    Args:
        kind: The service's kind in the fleet, see bottega.kinds.
        name: Its name in the fleet; empty is the kind and the process's id.
        what: Names the service in refusals, such as "the activation store".
        gateway: Address of the fleet; empty joins none.
        listening: The gRPC server.
        links: The links to workers.
    """

    def __init__(
        self, *, kind: str, name: str, what: str, gateway: str, listening: Listening, links: LinkServer[Any]
    ) -> None:
        self.name = name or f"{kind}-{os.getpid()}"
        self._kind = kind
        self._what = what
        self._gateway = gateway
        self._listening = listening
        self._links = links
        self._membership: FleetMembership | None = None
        self._memory = MemoryMeter(lambda: [os.getpid()])
        self._tasks = BackgroundTasks("measuring of memory")
        self._draining = False

    async def start(self) -> None:
        """Join the fleet. A subclass opens its store before."""
        self._tasks.start(self._memory.run())
        if self._gateway:
            registration = fleet_pb2.Registration(
                kind=self._kind,
                name=self.name,
                address=self._listening.address,
                version=importlib.metadata.version("bottega-services"),
                metrics_address=self._listening.metrics_address,
            )
            self._membership = FleetMembership(
                self._gateway, registration, load=self.load, channels=self._listening.channels
            )
            self._membership.start()

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return a link's offer for a worker, whose host is `caller`. Raises Draining, LinksFull, InvalidRequest."""
        if self._draining:
            raise Draining(f"{self._what} is stopping")
        return offer_to_wire(self._links.offer(request.worker, request.link_id, caller=caller))

    @abc.abstractmethod
    def load(self) -> fleet_pb2.Load:
        """Return the load that the fleet shows."""

    async def drain(self) -> None:
        """Refuse new links."""
        self._draining = True
        self._links.drain()
        if self._membership:
            self._membership.report_soon()

    async def stop(self) -> None:
        """Leave the fleet and end all links. A subclass closes its store afterwards."""
        if self._membership:
            await self._membership.stop()
        await self._tasks.cancel()
        await asyncio.to_thread(self._links.close)

    def link_counts(self) -> LinkCounts:
        """Return the current figures of the links. Thread-safe."""
        return link_counts(self._links.counters, open_links=len(self._links.handlers))
