"""Starts a LoRA store: `python -m bottega.loras --config FILE`. Without a file, every setting has its default."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from bottega import kinds
from bottega.loras.config import LoraConfig
from bottega.loras.metrics import LoraMetrics, import_counter
from bottega.loras.service import SERVICE_NAME, LoraService
from bottega.loras.store import LoraStore
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.link_service import add_link_service
from bottega.rpc.server import Server
from bottega.state_folder import state_folder
from bottega.v1 import lora_pb2_grpc


def main() -> int:
    """Run a store and return the exit status, see `boot`."""
    return boot("loras", LoraConfig, _lifespan, description="Bottega's LoRA store")


def build(settings: LoraConfig, folder: Path) -> tuple[Server, LoraStore]:
    """Return a store and its server, neither of them started. Call it in a running event loop."""
    server = Server("loras", settings.server)
    imports = import_counter(server.registry)
    store = LoraStore(settings, folder=folder, imports=imports, listening=server)
    server.registry.register(LoraMetrics(store.statistics))
    lora_pb2_grpc.add_LoraServiceServicer_to_server(LoraService(store), server.grpc)
    server.add_services([SERVICE_NAME])
    add_link_service(server, kinds.LORAS, store)
    return server, store


@contextlib.asynccontextmanager
async def _lifespan(settings: LoraConfig) -> AsyncIterator[ServiceHooks]:
    folder = Path(settings.folder) if settings.folder else state_folder() / "loras"
    server, store = build(settings, folder)
    yield ServiceHooks(server=server, warm_up=store.start, finish=store.drain, shut_down=store.stop)


if __name__ == "__main__":
    sys.exit(main())
