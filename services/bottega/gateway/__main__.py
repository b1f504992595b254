"""Boots a gateway: `python -m bottega.gateway --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from bottega.config import load
from bottega.errors import ConfigError
from bottega.gateway.config import GatewayConfig
from bottega.gateway.gateway import Gateway
from bottega.process.memory import keep_freed_memory, spare_the_collector
from bottega.rpc.server import run


def main() -> int:
    """Serves until SIGTERM or SIGINT; the exit status."""
    parser = argparse.ArgumentParser(prog="bottega.gateway", description="Bottega's gateway.")
    parser.add_argument("--config", type=Path, help="YAML file; every key has a default")
    try:
        asyncio.run(_serve(load(GatewayConfig, parser.parse_args().config)))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


async def _serve(config: GatewayConfig) -> None:
    keep_freed_memory()
    spare_the_collector()
    gateway = Gateway(config)
    await run(gateway.server, warm_up=gateway.warm_up, finish=gateway.finish, shut_down=gateway.shut_down)


if __name__ == "__main__":
    sys.exit(main())
