"""The approximate cache as a service: its store, its links, and its membership in the fleet.

`service.py` translates between it and gRPC.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
from pathlib import Path

from google.protobuf import json_format

from bottega import kinds, rules
from bottega.background_tasks import BackgroundTasks
from bottega.cache.config import CacheConfig
from bottega.cache.metrics import CacheStatistics
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.cache.validation import check_profile
from bottega.cache.worker_link import CacheLinks
from bottega.errors import ConfigError, Draining, InvalidRequest, StorageUnavailable
from bottega.planning.eviction import FIFO, LCBFU, LFU, LRU, EvictionPolicy, decayed_lcbfu
from bottega.process.memory import MemoryMeter
from bottega.rpc.fleet_membership import FleetMembership, Listening
from bottega.rpc.operation.link_metrics import link_counts
from bottega.transport import offer_to_wire
from bottega.v1 import fleet_pb2
from bottega.v1.cache_pb2 import CacheProfile
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest

_log = logging.getLogger(__name__)


class CacheServer:
    """The server of an approximate cache. Start it with `start`, end it with `drain` and `stop`.

    Raises ConfigError if a configured profile cannot be used, or an address cannot be bound.

    Args:
        listening: The gRPC server.
    """

    def __init__(self, config: CacheConfig, *, folder: Path, listening: Listening) -> None:
        self.name = config.name or f"cache-{os.getpid()}"
        self._config = config
        self._listening = listening
        self._version = importlib.metadata.version("bottega-services")
        self._profiles = read_profiles(config)
        self.store = LatentStore(store_settings(config, folder))
        self._links = CacheLinks(config.links, store=self.store)
        self._membership: FleetMembership | None = None
        self._memory = MemoryMeter(lambda: [os.getpid()])
        self._tasks = BackgroundTasks("measuring of memory")
        self._draining = False

    async def start(self) -> None:
        """Open the store and join the fleet. Earlier entries are read in the background.

        Raises ConfigError, and Unavailable if another process uses the folder.
        """
        await asyncio.to_thread(self._open)
        self._tasks.start(self._memory.run())
        if self._config.gateway:
            self._membership = self._join()
            self._membership.start()

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return a link's offer for a worker, whose host is `caller`. Raises Draining, LinksFull, InvalidRequest."""
        if self._draining:
            raise Draining("the approximate cache is stopping")
        return offer_to_wire(self._links.offer(request.worker, request.link_id, caller=caller))

    def load(self) -> fleet_pb2.Load:
        """Return how busy it is."""
        lookups = self.store.lookups()
        return fleet_pb2.Load(
            draining=self._draining,
            memory_bytes=self._memory.resident_bytes,
            activity=fleet_pb2.Activity(lookups=sum(lookups.values()), hits=lookups["hit"]),
        )

    async def drain(self) -> None:
        """Offer no more links. Jobs continue without pending answers."""
        self._draining = True
        self._links.drain()
        if self._membership:
            self._membership.report_soon()

    async def stop(self) -> None:
        """Leave the fleet, end every link, and write pending recordings."""
        if self._membership:
            await self._membership.stop()
        await self._tasks.cancel()
        await asyncio.to_thread(self._links.close)
        await asyncio.to_thread(self.store.close)

    def statistics(self) -> CacheStatistics:
        """Return the current figures. Any thread may call it."""
        links = link_counts(self._links.counters, open_links=len(self._links.handlers))
        return CacheStatistics(store=self.store.statistics(), links=links)

    def _open(self) -> None:
        self.store.start()
        for profile in self._profiles:
            try:
                self.store.add_profile(profile)
            except StorageUnavailable as error:
                # Without the profile nothing is reused, but the cache can start.
                _log.warning(
                    "a profile could not be kept", extra={"model_hash": profile.model_hash, "text": error.message}
                )

    def _join(self) -> FleetMembership:
        registration = fleet_pb2.Registration(
            kind=kinds.CACHE,
            name=self.name,
            address=self._listening.address,
            version=self._version,
            metrics_address=self._listening.metrics_address,
        )
        return FleetMembership(self._config.gateway, registration, load=self.load, channels=self._listening.channels)


def store_settings(config: CacheConfig, folder: Path) -> StoreSettings:
    """Return the store's settings in the configuration."""
    return StoreSettings(
        folder=folder,
        budget_bytes=config.budget_bytes,
        policy=_policy(config),
        max_entries=config.max_entries,
        min_free_bytes=config.min_free_bytes,
        exploration=config.exploration,
        row_pictures=config.row_pictures,
        plain_for_loras=config.plain_for_loras,
        predictor=config.predictor,
    )


def read_profiles(config: CacheConfig) -> list[CacheProfile]:
    """Return the profiles of the files that a configuration names. Raises ConfigError."""
    return [read_profile(Path(path)) for path in config.profiles]


def read_profile(path: Path) -> CacheProfile:
    """Return the profile of a file. Raises ConfigError."""
    try:
        profile = json_format.Parse(path.read_text(encoding="utf-8"), CacheProfile())
        rules.refuse(list(check_profile(profile)))
    except OSError as error:
        raise ConfigError(f"profiles: {path} cannot be read: {error.strerror}") from None
    except (json_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"profiles: {path} is not a profile: {error}") from None
    except InvalidRequest as error:
        raise ConfigError(f"profiles: {path} cannot be used: {error.message}") from None
    return profile


def _policy(config: CacheConfig) -> EvictionPolicy:
    if config.policy == "lcbfu-decayed":
        return decayed_lcbfu(config.half_life)
    return {"lcbfu": LCBFU, "lru": LRU, "lfu": LFU, "fifo": FIFO}[config.policy]
