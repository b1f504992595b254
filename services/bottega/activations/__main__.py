"""Starts an activation store: `python -m bottega.activations [--config FILE]`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from bottega import kinds
from bottega.activations.config import ActivationsConfig
from bottega.activations.metrics import ActivationMetrics
from bottega.activations.server import ActivationServer
from bottega.activations.service import SERVICE_NAME, ActivationService
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.link_service import add_link_service
from bottega.rpc.server import Server
from bottega.state_folder import state_folder
from bottega.v1 import activations_pb2_grpc


def main() -> int:
    """Run the service and return the exit status; see `boot`."""
    return boot("activations", ActivationsConfig, _lifespan, description="Bottega's activation store")


def build(settings: ActivationsConfig, folder: Path) -> tuple[Server, ActivationServer]:
    """Return a store's server and its activation server, both not started. Requires a running event loop."""
    server = Server("activations", settings.server)
    activations = ActivationServer(settings, folder=folder, listening=server)
    server.registry.register(ActivationMetrics(activations.statistics))
    service = ActivationService(activations.store, holder=activations.name)
    activations_pb2_grpc.add_ActivationServiceServicer_to_server(service, server.grpc)
    server.add_services([SERVICE_NAME])
    add_link_service(server, kinds.ACTIVATIONS, activations)
    return server, activations


@contextlib.asynccontextmanager
async def _lifespan(settings: ActivationsConfig) -> AsyncIterator[ServiceHooks]:
    folder = Path(settings.folder) if settings.folder else state_folder() / "activations"
    server, activations = build(settings, folder)
    yield ServiceHooks(server=server, warm_up=activations.start, finish=activations.drain, shut_down=activations.stop)


if __name__ == "__main__":
    sys.exit(main())
