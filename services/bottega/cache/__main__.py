"""Starts an approximate cache: `python -m bottega.cache [--config FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from bottega import kinds
from bottega.cache.config import CacheConfig
from bottega.cache.server import CacheServer
from bottega.cache.service import SERVICE_NAME, CacheService
from bottega.rpc.server import Server
from bottega.rpc.store_server import add_store, boot_store
from bottega.v1 import cache_pb2_grpc


def main() -> int:
    """Run the service and return the exit status."""
    return boot_store(kinds.CACHE, CacheConfig, build, description="Bottega's approximate cache")


def build(settings: CacheConfig, folder: Path) -> tuple[Server, CacheServer]:
    """Create a cache and its gRPC server without starting them. Requires a running event loop."""
    server = Server(kinds.CACHE, settings.server)
    cache = CacheServer(settings, folder=folder, listening=server)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheService(cache.store), server.grpc)
    add_store(server, kinds.CACHE, cache, service=SERVICE_NAME)
    return server, cache


if __name__ == "__main__":
    sys.exit(main())
