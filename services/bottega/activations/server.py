"""The activation store as a service. `service.py` translates between the store and gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bottega import kinds
from bottega.activations.config import ActivationsConfig
from bottega.activations.metrics import ActivationServerStatistics
from bottega.activations.store.settings import ActivationStoreSettings
from bottega.activations.store.store import ActivationStore
from bottega.activations.worker_link import ActivationLinks
from bottega.rpc.fleet_membership import Listening
from bottega.rpc.store_server import StoreServer
from bottega.v1 import fleet_pb2


class ActivationServer(StoreServer):
    """An activation store with its links. Raises ConfigError if an address of the links cannot be bound."""

    def __init__(self, config: ActivationsConfig, *, folder: Path, listening: Listening) -> None:
        self._config = config
        self.store = ActivationStore(store_settings(config, folder))
        super().__init__(
            kind=kinds.ACTIVATIONS,
            name=config.name,
            what="the activation store",
            gateway=config.gateway,
            listening=listening,
            links=ActivationLinks(config.links, store=self.store),
        )

    async def start(self) -> None:
        """Open the store and join the fleet.

        Raise ConfigError if the store cannot be opened, or Unavailable if another process uses the folder.
        """
        await asyncio.to_thread(self.store.start)
        await super().start()

    def load(self) -> fleet_pb2.Load:
        """Return the load that the fleet shows."""
        # Files in memory are not part of this process's resident memory. A worker that maps some counts them as well.
        memory_bytes = self._memory.resident_bytes + self.store.memory_bytes
        hits, misses = self.store.lookups()
        activity = fleet_pb2.Activity(lookups=hits + misses, hits=hits)
        return fleet_pb2.Load(draining=self._draining, memory_bytes=memory_bytes, activity=activity)

    async def drain(self) -> None:
        """Refuse new links, and wait until nothing is being sent. Edits compute what they do not get."""
        await super().drain()
        await asyncio.to_thread(self.store.wait_idle, self._config.server.drain_grace_s)

    async def stop(self) -> None:
        """Leave the fleet, close all links, and finish writing recordings."""
        await super().stop()
        await asyncio.to_thread(self.store.close)

    def statistics(self) -> ActivationServerStatistics:
        """Return the current figures. Thread-safe."""
        return ActivationServerStatistics(store=self.store.statistics(), links=self.link_counts())


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
