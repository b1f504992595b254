"""Boots a gateway: `python -m bottega.gateway --config FILE`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from bottega.config import load
from bottega.errors import BottegaError, ConfigError
from bottega.gateway.config import GatewayConfig
from bottega.gateway.gateway import Gateway
from bottega.process.memory import given_back_at_rest, keep_freed_memory, spare_the_collector
from bottega.rpc.server import run

# Later than any start whose disk can be used: until then, whoever waits for the gateway waits for one that serves.
_ANSWERS_AFTER_S = 5.0


def main() -> int:
    """Serves until SIGTERM or SIGINT; the exit status: 2 for a configuration that cannot be used, 1 for the rest."""
    parser = argparse.ArgumentParser(prog="bottega.gateway", description="Bottega's gateway.")
    parser.add_argument("--config", type=Path, help="YAML file; every key has a default")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop as at SIGTERM when stdin, a pipe, ends")
    arguments = parser.parse_args()
    try:
        asyncio.run(_serve(load(GatewayConfig, arguments.config), stop_with_stdin=arguments.stop_with_stdin))
    except BottegaError as error:
        print(f"bottega.gateway: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _serve(config: GatewayConfig, *, stop_with_stdin: bool) -> None:
    keep_freed_memory()
    spare_the_collector()
    gateway = Gateway(config)
    async with given_back_at_rest():
        await run(
            gateway.server,
            warm_up=gateway.warm_up,
            finish=gateway.finish,
            shut_down=gateway.shut_down,
            answers_after_s=_ANSWERS_AFTER_S,
            stop_with_stdin=stop_with_stdin,
        )


if __name__ == "__main__":
    sys.exit(main())
