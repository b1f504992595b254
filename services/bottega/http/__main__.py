"""Starts the HTTP API: `python -m bottega.http [--config FILE]`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator

from bottega.http.config import HttpConfig
from bottega.http.server import HttpServer
from bottega.rpc.boot import ServiceHooks, boot


def main() -> int:
    """Run the service and return the exit status."""
    return boot("http", HttpConfig, _lifespan, description="Bottega's HTTP API")


@contextlib.asynccontextmanager
async def _lifespan(config: HttpConfig) -> AsyncIterator[ServiceHooks]:
    server = HttpServer(config)
    yield ServiceHooks(server=server, warm_up=server.check_gateway, shut_down=server.close)


if __name__ == "__main__":
    sys.exit(main())
