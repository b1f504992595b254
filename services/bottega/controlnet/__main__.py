"""Starts a ControlNet server: `python -m bottega.controlnet --config FILE`. Every setting has its default."""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from bottega import config
from bottega.controlnet.catalogue import Catalogue
from bottega.controlnet.config import ControlNetConfig, EngineConfig
from bottega.controlnet.engine_front import EngineFront
from bottega.controlnet.metrics import ControlNetMetrics
from bottega.controlnet.profiles import Profiles
from bottega.controlnet.server import ControlNetServer, open_catalogue
from bottega.controlnet.service import SERVICE_NAME, ControlNetService
from bottega.errors import BottegaError, ConfigError
from bottega.process import Patience
from bottega.process.memory import given_back_at_rest, keep_freed_memory, spare_the_collector
from bottega.rpc.server import Server, run
from bottega.state_folder import state_folder
from bottega.transport import own_socket
from bottega.v1 import controlnet_pb2_grpc


def main() -> int:
    """Returns the exit code, with a line on stderr when the server cannot start: 2 by its configuration, else 1."""
    parser = argparse.ArgumentParser(prog="python -m bottega.controlnet", description="Bottega's ControlNet server")
    parser.add_argument("--config", type=Path, help="YAML file; see ControlNetConfig for the keys")
    parser.add_argument("--stop-with-stdin", action="store_true", help="stop as at SIGTERM when stdin, a pipe, ends")
    arguments = parser.parse_args()
    try:
        settings = config.load(ControlNetConfig, arguments.config)
        catalogue, profiles = open_catalogue(settings, state_folder())
        asyncio.run(_serve(settings, catalogue, profiles, stop_with_stdin=arguments.stop_with_stdin))
    except BottegaError as error:
        print(f"bottega.controlnet: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


async def _serve(
    settings: ControlNetConfig, catalogue: Catalogue, profiles: Profiles, *, stop_with_stdin: bool
) -> None:
    keep_freed_memory()
    spare_the_collector()
    patience = Patience(start_s=settings.start_s, hang_s=settings.hang_s, stall_s=settings.stall_s)
    engine = EngineFront(_with_socket(settings.engine), patience=patience)
    try:
        await engine.spawn()
        server = Server("controlnet", settings.server)
        controlnets = ControlNetServer(
            settings,
            catalogue=catalogue,
            profiles=profiles,
            engine=engine,
            metrics=ControlNetMetrics(server.registry),
            address=lambda: server.address,
            set_serving=server.set_serving,
        )
        controlnet_pb2_grpc.add_ControlNetServiceServicer_to_server(ControlNetService(controlnets), server.grpc)
        server.add_services([SERVICE_NAME])
        async with given_back_at_rest():
            await run(
                server,
                warm_up=controlnets.start,
                finish=controlnets.drain,
                shut_down=controlnets.stop,
                stop_with_stdin=stop_with_stdin,
            )
    finally:
        await engine.stop()


def _with_socket(engine: EngineConfig) -> EngineConfig:
    """With the path of a unix socket, where none is configured: the same for every engine of this process."""
    if engine.links_socket != "":
        return engine
    return replace(engine, links_socket=str(own_socket("controlnet")))


if __name__ == "__main__":
    sys.exit(main())
