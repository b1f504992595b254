"""The activation store as a service: its store, its links, and its membership of the fleet.

`service.py` translates between the store and gRPC.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
from pathlib import Path

from bottega import kinds
from bottega.activations.config import ActivationsConfig
from bottega.activations.metrics import ActivationServerStatistics
from bottega.activations.store.settings import ActivationStoreSettings
from bottega.activations.store.store import ActivationStore
from bottega.activations.worker_link import ActivationLinks
from bottega.background_tasks import BackgroundTasks
from bottega.errors import Draining
from bottega.process.memory import MemoryMeter
from bottega.rpc.fleet_membership import FleetMembership, Listening
from bottega.rpc.operation.link_metrics import link_counts
from bottega.transport import offer_to_wire
from bottega.v1 import fleet_pb2
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest


class ActivationServer:
    """An activation store with its links. Raises ConfigError if an address of the links cannot be bound."""

    def __init__(self, config: ActivationsConfig, *, folder: Path, listening: Listening) -> None:
        self.name = config.name or f"activations-{os.getpid()}"
        self._config = config
        self._listening = listening
        self._version = importlib.metadata.version("bottega-services")
        self.store = ActivationStore(store_settings(config, folder))
        self._links = ActivationLinks(config.links, store=self.store)
        self._membership: FleetMembership | None = None
        self._memory = MemoryMeter(lambda: [os.getpid()])
        self._tasks = BackgroundTasks("measuring of memory")
        self._draining = False

    async def start(self) -> None:
        """Open the store and join the fleet.

        Raise ConfigError if the store cannot be opened, or Unavailable if another process uses the folder.
        """
        await asyncio.to_thread(self.store.start)
        self._tasks.start(self._memory.run())
        if self._config.gateway:
            self._membership = self._join()
            self._membership.start()

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return a link's offer for a worker on host `caller`. Raise Draining, LinksFull or InvalidRequest."""
        if self._draining:
            raise Draining("the activation store is stopping")
        return offer_to_wire(self._links.offer(request.worker, request.link_id, caller=caller))

    def load(self) -> fleet_pb2.Load:
        """Return the load that the fleet shows."""
        # Files in memory are not part of this process's resident memory. A worker that maps some counts them as well.
        memory_bytes = self._memory.resident_bytes + self.store.memory_bytes
        hits, misses = self.store.lookups()
        activity = fleet_pb2.Activity(lookups=hits + misses, hits=hits)
        return fleet_pb2.Load(draining=self._draining, memory_bytes=memory_bytes, activity=activity)

    async def drain(self) -> None:
        """Refuse new links, and wait until nothing is being sent. Edits compute what they do not get."""
        self._draining = True
        self._links.drain()
        if self._membership:
            self._membership.report_soon()
        await asyncio.to_thread(self.store.wait_idle, self._config.server.drain_grace_s)

    async def stop(self) -> None:
        """Leave the fleet, close all links, and finish writing recordings."""
        if self._membership:
            await self._membership.stop()
        await self._tasks.cancel()
        await asyncio.to_thread(self._links.close)
        await asyncio.to_thread(self.store.close)

    def statistics(self) -> ActivationServerStatistics:
        """Return the current figures. Thread-safe."""
        links = link_counts(self._links.counters, open_links=len(self._links.handlers))
        return ActivationServerStatistics(store=self.store.statistics(), links=links)

    def _join(self) -> FleetMembership:
        registration = fleet_pb2.Registration(
            kind=kinds.ACTIVATIONS,
            name=self.name,
            address=self._listening.address,
            version=self._version,
            metrics_address=self._listening.metrics_address,
        )
        return FleetMembership(self._config.gateway, registration, load=self.load, channels=self._listening.channels)


def store_settings(config: ActivationsConfig, folder: Path) -> ActivationStoreSettings:
    """Return the store's settings from the configuration."""
    return ActivationStoreSettings(
        folder=folder,
        memory_budget_bytes=config.budget_bytes,
        disk_budget_bytes=config.disk_bytes,
        template_budget_bytes=config.template_mib << 20,
        min_free_bytes=config.min_free_bytes,
        max_waiting_bytes=config.waiting_bytes,
        max_loads=config.loads_at_once,
    )
