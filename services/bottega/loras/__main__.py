"""Starts a LoRA store: `python -m bottega.loras [--config FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from bottega import kinds
from bottega.loras.config import LoraConfig
from bottega.loras.service import SERVICE_NAME, LoraService
from bottega.loras.store import LoraStore
from bottega.rpc.server import Server
from bottega.rpc.store_server import add_store, boot_store
from bottega.v1 import lora_pb2_grpc


def main() -> int:
    """Run the service and return the exit status."""
    return boot_store(kinds.LORAS, LoraConfig, build, description="Bottega's LoRA store")


def build(settings: LoraConfig, folder: Path) -> tuple[Server, LoraStore]:
    """Create a store and its gRPC server without starting them. Requires a running event loop."""
    server = Server(kinds.LORAS, settings.server)
    store = LoraStore(settings, folder=folder, listening=server)
    lora_pb2_grpc.add_LoraServiceServicer_to_server(LoraService(store), server.grpc)
    add_store(server, kinds.LORAS, store, service=SERVICE_NAME)
    return server, store


if __name__ == "__main__":
    sys.exit(main())
