"""Starts a LoRA store: `python -m bottega.loras --config FILE`. Without a file every setting has its default."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from bottega import config
from bottega.errors import BottegaError, ConfigError
from bottega.loras.config import LoraConfig
from bottega.loras.metrics import LoraMetrics
from bottega.loras.service import SERVICE_NAME, LoraService
from bottega.loras.store import LoraStore
from bottega.process.memory import given_back_at_rest, keep_freed_memory, spare_the_collector
from bottega.rpc.server import Server, run
from bottega.state_folder import state_folder
from bottega.v1 import lora_pb2_grpc


def main() -> int:
    """Returns the exit code, with a line on stderr: 2 for a configuration that cannot be used, 1 for what may pass."""
    parser = argparse.ArgumentParser(prog="python -m bottega.loras", description="Bottega's LoRA store")
    parser.add_argument("--config", type=Path, help="YAML file; see LoraConfig for the keys")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop as at SIGTERM when stdin, a pipe, ends")
    arguments = parser.parse_args()
    try:
        settings = config.load(LoraConfig, arguments.config)
        folder = Path(settings.folder) if settings.folder else state_folder() / "loras"
        asyncio.run(_serve(settings, folder, stop_with_stdin=arguments.stop_with_stdin))
    except BottegaError as error:
        print(f"bottega.loras: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def build(settings: LoraConfig, folder: Path) -> tuple[Server, LoraStore]:
    """A store and its server, neither of them started. In a running event loop."""
    server = Server("loras", settings.server)
    metrics = LoraMetrics(server.registry)
    store = LoraStore(settings, folder=folder, metrics=metrics, address=lambda: server.address)
    lora_pb2_grpc.add_LoraServiceServicer_to_server(LoraService(store), server.grpc)
    server.add_services([SERVICE_NAME])
    return server, store


async def _serve(settings: LoraConfig, folder: Path, *, stop_with_stdin: bool) -> None:
    keep_freed_memory()
    spare_the_collector()
    server, store = build(settings, folder)
    async with given_back_at_rest():
        await run(
            server,
            warm_up=store.start,
            finish=store.drain,
            shut_down=store.stop,
            stop_with_stdin=stop_with_stdin,
        )


if __name__ == "__main__":
    sys.exit(main())
