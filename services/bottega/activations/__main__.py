"""Starts an activation store: `python -m bottega.activations [--config FILE]`."""

from __future__ import annotations

import sys
from pathlib import Path

from bottega import kinds
from bottega.activations.config import ActivationsConfig
from bottega.activations.server import ActivationServer
from bottega.activations.service import SERVICE_NAME, ActivationService
from bottega.rpc.server import Server
from bottega.rpc.store_server import add_store, boot_store
from bottega.v1 import activations_pb2_grpc


def main() -> int:
    """Run the service and return the exit status."""
    return boot_store(kinds.ACTIVATIONS, ActivationsConfig, build, description="Bottega's activation store")


def build(settings: ActivationsConfig, folder: Path) -> tuple[Server, ActivationServer]:
    """Create a store's gRPC server and its activation server without starting them. Requires a running event loop."""
    server = Server(kinds.ACTIVATIONS, settings.server)
    activations = ActivationServer(settings, folder=folder, listening=server)
    service = ActivationService(activations.store, holder=activations.name)
    activations_pb2_grpc.add_ActivationServiceServicer_to_server(service, server.grpc)
    add_store(server, kinds.ACTIVATIONS, activations, service=SERVICE_NAME)
    return server, activations


if __name__ == "__main__":
    sys.exit(main())
