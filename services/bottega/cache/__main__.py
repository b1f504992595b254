"""Starts an approximate cache: `python -m bottega.cache --config FILE`. Without a file, all settings have defaults."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from bottega import kinds
from bottega.cache.config import CacheConfig
from bottega.cache.metrics import CacheMetrics
from bottega.cache.server import CacheServer
from bottega.cache.service import SERVICE_NAME, CacheService
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.link_service import add_link_service
from bottega.rpc.server import Server
from bottega.state_folder import state_folder
from bottega.v1 import cache_pb2_grpc


def main() -> int:
    """Run the cache; return the exit status, see `boot`."""
    return boot("cache", CacheConfig, _lifespan, description="Bottega's approximate cache")


def build(settings: CacheConfig, folder: Path) -> tuple[Server, CacheServer]:
    """Return a cache and its server, neither of them started. Call it in a running event loop."""
    server = Server("cache", settings.server)
    cache = CacheServer(settings, folder=folder, listening=server)
    server.registry.register(CacheMetrics(cache.statistics))
    cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(cache.store), server.grpc)
    server.add_services([SERVICE_NAME])
    add_link_service(server, kinds.CACHE, cache)
    return server, cache


@contextlib.asynccontextmanager
async def _lifespan(settings: CacheConfig) -> AsyncIterator[ServiceHooks]:
    folder = Path(settings.folder) if settings.folder else state_folder() / "cache"
    server, cache = build(settings, folder)
    yield ServiceHooks(server=server, warm_up=cache.start, finish=cache.drain, shut_down=cache.stop)


if __name__ == "__main__":
    sys.exit(main())
