"""The activation store as a service, and its metrics. `service.py` converts between the store and gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics_core import Metric

from bottega import kinds
from bottega.activations.config import ActivationsConfig
from bottega.activations.store.settings import ActivationStoreSettings
from bottega.activations.store.statistics import ActivationStatistics
from bottega.activations.store.store import ActivationStore
from bottega.activations.worker_link import ActivationLinks
from bottega.rpc.fleet_membership import Listening
from bottega.rpc.operation.metric_families import counter_by, counters, gauge_by, gauges
from bottega.rpc.store_server import StoreServer
from bottega.v1 import fleet_pb2

_PREFIX = "bottega_activations"


class ActivationServer(StoreServer):
    """An activation store with its servers. Raises ConfigError if an address for connections cannot be bound."""

    def __init__(self, config: ActivationsConfig, *, folder: Path, listening: Listening) -> None:
        self._config = config
        self.store = ActivationStore(store_settings(config, folder))
        super().__init__(
            config,
            kind=kinds.ACTIVATIONS,
            what="the activation store",
            listening=listening,
            links=ActivationLinks(config.links, store=self.store),
        )

    def load(self) -> fleet_pb2.Load:
        """Return the load to report to the fleet."""
        # Files in memory are not part of this process's resident memory. A worker that maps some counts them as well.
        memory_bytes = self._memory.resident_bytes + self.store.memory_bytes
        hits, misses = self.store.lookups()
        activity = fleet_pb2.Activity(lookups=hits + misses, hits=hits)
        return fleet_pb2.Load(draining=self._draining, memory_bytes=memory_bytes, activity=activity)

    async def drain(self) -> None:
        """Refuse new connections, and wait until no section is being sent. Edits compute what they lack."""
        await super().drain()
        await asyncio.to_thread(self.store.wait_idle, self._config.server.drain_grace_s)

    async def _open(self) -> None:
        await asyncio.to_thread(self.store.start)

    async def _close(self) -> None:
        await asyncio.to_thread(self.store.close)

    def _metrics(self) -> Iterator[Metric]:
        figures = self.store.statistics()
        yield from _counters(figures)
        yield from _gauges(figures)


def store_settings(config: ActivationsConfig, folder: Path) -> ActivationStoreSettings:
    """Convert the configuration to the store's settings."""
    return ActivationStoreSettings(
        folder=folder,
        memory_budget_bytes=config.budget_bytes,
        disk_budget_bytes=config.disk_bytes,
        template_budget_bytes=config.template_mib << 20,
        min_free_bytes=config.min_free_bytes,
        max_waiting_bytes=config.waiting_bytes,
        max_loads=config.loads_at_once,
    )


def _counters(store: ActivationStatistics) -> Iterator[Metric]:
    lookups = {"hit": store.hits, "miss": store.misses}
    text = "Questions of workers, by whether the image was recorded."
    yield counter_by("outcome", f"{_PREFIX}_lookups", text, lookups)
    text = "Sections given to workers: from memory, loaded into memory, or from disk because memory was full."
    yield counter_by("tier", f"{_PREFIX}_fetches", text, store.fetches)
    text = "Sections and recordings that were dropped, by reason."
    yield counter_by("reason", f"{_PREFIX}_dropped", text, store.dropped)
    yield from counters(
        _PREFIX,
        ("loads", "Files that were loaded into memory.", store.loads),
        ("loaded_bytes", "Bytes of the files that were loaded into memory.", store.loaded_bytes),
        ("load_seconds", "Seconds that loading files into memory took.", store.load_s),
        ("recorded", "Images that were recorded.", store.recorded),
        ("recorded_sections", "Sections that were recorded, including replacements.", store.recorded_sections),
        ("evictions", "Images whose recordings were evicted.", store.evictions),
        ("memory_evictions", "Files that were evicted from memory.", store.memory_evictions),
        ("damaged", "Damaged files that were found and deleted.", store.damaged),
    )


def _gauges(store: ActivationStatistics) -> Iterator[Metric]:
    used = {"memory": store.memory_bytes, "disk": store.disk_bytes}
    text = "Bytes of activations, by tier. Everything in memory is on disk as well."
    yield gauge_by("tier", f"{_PREFIX}_bytes", text, used)
    budgets = {"memory": store.memory_budget_bytes, "disk": store.disk_budget_bytes}
    yield gauge_by("tier", f"{_PREFIX}_budget_bytes", "Upper bound on the bytes of activations, by tier.", budgets)
    yield from gauges(
        _PREFIX,
        ("templates", "Templates.", store.templates),
        ("sections", "Stored sections: recorded forward passes of all images.", store.sections),
        ("pinned", "Pinned images, whose recordings are never evicted.", store.pinned),
        ("recording", "Images that are being recorded.", store.recording),
        ("waiting_bytes", "Bytes of sections that wait to be written.", store.waiting_bytes),
        ("disk_bytes_per_second", "Recent rate of loads from disk; 0 if unknown.", store.disk_bytes_per_s),
        ("in_trouble", "1 if nothing can be recorded now, else 0.", int(bool(store.trouble))),
    )
