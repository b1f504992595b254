"""The approximate cache as a service. `service.py` translates between the store and gRPC."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from google.protobuf import json_format

from bottega import kinds, rules
from bottega.addons.cache.planning.eviction import FIFO, LCBFU, LFU, LRU, EvictionPolicy, decayed_lcbfu
from bottega.cache.config import CacheConfig
from bottega.cache.metrics import CacheStatistics
from bottega.cache.profiles import check_profile
from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.cache.worker_link import CacheLinks
from bottega.errors import ConfigError, InvalidRequest, StorageUnavailable
from bottega.rpc.fleet_membership import Listening
from bottega.rpc.store_server import StoreServer
from bottega.v1 import fleet_pb2
from bottega.v1.cache_pb2 import CacheProfile

_log = logging.getLogger(__name__)


class CacheServer(StoreServer):
    """The server of an approximate cache.

    Raises ConfigError if a configured profile cannot be used, or an address cannot be bound.
    """

    def __init__(self, config: CacheConfig, *, folder: Path, listening: Listening) -> None:
        self._profiles = read_profiles(config)
        self.store = LatentStore(store_settings(config, folder))
        super().__init__(
            kind=kinds.CACHE,
            name=config.name,
            what="the approximate cache",
            gateway=config.gateway,
            listening=listening,
            links=CacheLinks(config.links, store=self.store),
        )

    async def start(self) -> None:
        """Open the store and join the fleet. Earlier entries are read in the background.

        Raises ConfigError, and Unavailable if another process uses the folder.
        """
        await asyncio.to_thread(self._open)
        await super().start()

    def load(self) -> fleet_pb2.Load:
        """Return how busy it is."""
        lookups = self.store.lookups()
        return fleet_pb2.Load(
            draining=self._draining,
            memory_bytes=self._memory.resident_bytes,
            activity=fleet_pb2.Activity(lookups=sum(lookups.values()), hits=lookups["hit"]),
        )

    async def stop(self) -> None:
        """Leave the fleet, end every link, and write pending recordings."""
        await super().stop()
        await asyncio.to_thread(self.store.close)

    def statistics(self) -> CacheStatistics:
        """Return the current figures. Any thread may call it."""
        return CacheStatistics(store=self.store.statistics(), links=self.link_counts())

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
