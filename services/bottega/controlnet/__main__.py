"""Starts a ControlNet server: `python -m bottega.controlnet --config FILE`. Every setting has a default."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from bottega import kinds
from bottega.controlnet.catalogue import ControlNetCatalogue, ProfileStore, lock_catalogue, open_catalogue
from bottega.controlnet.config import ControlNetConfig, ControlNetEngineConfig
from bottega.controlnet.engine_client import ControlNetEngineClient, ControlNetInspector
from bottega.controlnet.metrics import ControlNetMetrics
from bottega.controlnet.server import ControlNetServer
from bottega.controlnet.service import SERVICE_NAME, ControlNetService
from bottega.process.engine_supervisor import EngineTimeouts
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.link_service import add_link_service
from bottega.rpc.server import Server
from bottega.state_folder import state_folder
from bottega.storage.folders import ProcessLock
from bottega.transport import default_socket_path
from bottega.v1 import controlnet_pb2_grpc

if TYPE_CHECKING:  # psycopg is optional
    from bottega.controlnet.shared_catalogue import CatalogueFollower


def main() -> int:
    """Run the server; return the exit status, see `boot`."""
    return boot("controlnet", ControlNetConfig, _lifespan_of, description="Bottega's ControlNet server")


def _lifespan_of(settings: ControlNetConfig) -> AbstractAsyncContextManager[ServiceHooks]:
    lock = lock_catalogue(settings, state_folder())
    return _lifespan(settings, lock, *open_catalogue(settings, state_folder()))


@contextlib.asynccontextmanager
async def _lifespan(
    settings: ControlNetConfig, lock: ProcessLock, catalogue: ControlNetCatalogue, profiles: ProfileStore
) -> AsyncIterator[ServiceHooks]:
    timeouts = EngineTimeouts(start_stall_s=settings.start_stall_s, hang_s=settings.hang_s, stall_s=settings.stall_s)
    engine = ControlNetEngineClient(_with_socket(settings.engine), timeouts=timeouts)
    try:
        if not settings.engine_on_demand:
            await engine.spawn()
        server = Server("controlnet", settings.server)
        controlnets = ControlNetServer(
            settings,
            catalogue=catalogue,
            profiles=profiles,
            engine=engine,
            inspector=ControlNetInspector(),
            metrics=ControlNetMetrics(server.registry),
            server=server,
        )
        controlnet_pb2_grpc.add_ControlNetServiceServicer_to_server(ControlNetService(controlnets), server.grpc)
        server.add_services([SERVICE_NAME])
        add_link_service(server, kinds.CONTROLNET, controlnets)
        follower = _follower(catalogue, controlnets)

        async def start() -> None:
            await controlnets.start()
            if follower is not None:
                follower.start()

        async def stop() -> None:
            if follower is not None:
                await follower.stop()
            await controlnets.stop()

        yield ServiceHooks(
            server=server, warm_up=start, failed=controlnets.failed, finish=controlnets.drain, shut_down=stop
        )
    finally:
        await engine.stop()
        lock.release()


def _follower(catalogue: ControlNetCatalogue, server: ControlNetServer) -> CatalogueFollower | None:
    if catalogue.shared is None:
        return None
    from bottega.controlnet.shared_catalogue import CatalogueFollower

    return CatalogueFollower(catalogue, catalogue.shared, server)


def _with_socket(engine: ControlNetEngineConfig) -> ControlNetEngineConfig:
    """Fill in the path of the unix socket. All engine processes of this server use the same path."""
    if engine.links.socket != "":
        return engine
    return replace(engine, links=replace(engine.links, socket=str(default_socket_path("controlnet"))))


if __name__ == "__main__":
    sys.exit(main())
