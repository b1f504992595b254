"""The worker's command: `python -m bottega.worker --config FILE`. Without a file every setting has its default."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from bottega import kinds, rules
from bottega.addons.interface.front_addon import load_front_addons
from bottega.codec.pool import CodecPool
from bottega.errors import ConfigError
from bottega.model_files.folder_check import name_of
from bottega.model_files.importing import CONVERSION_S, import_for_serving, import_vae_for_serving
from bottega.model_files.single_file import is_single_file
from bottega.process.engine_supervisor import EngineTimeouts
from bottega.process.memory import IMAGE_AT_WORK_BYTES
from bottega.rpc.boot import ServiceHooks, boot
from bottega.rpc.fleet_membership import FleetMembership, registration_of
from bottega.rpc.gateway_membership import REPORT_INTERVAL_S
from bottega.rpc.link_service import add_link_service
from bottega.rpc.operation.sd_notify import SystemdNotifier
from bottega.rpc.server import Server
from bottega.state_folder import service_state
from bottega.transport import default_socket_path, links_group
from bottega.v1 import fleet_pb2
from bottega.worker.config import EngineConfig, WorkerConfig, check_model, report_on_model, single_vae
from bottega.worker.engine_client import WorkerEngineClient
from bottega.worker.metrics import WorkerMetrics
from bottega.worker.service import SERVICE_NAME, WorkerService
from bottega.worker.worker import Worker

_log = logging.getLogger(__name__)

# Seconds for which a worker that cannot serve its model tries to reach the fleet. It ends within 2 s in all.
_JOIN_S = 0.5
# Every attempt may have eight images that wait to be encoded.
_IMAGES_PER_ATTEMPT = 8


def main() -> int:
    """Run the worker and return the exit status; see `boot`."""
    title = "Bottega's base-model worker"
    return boot("worker", WorkerConfig, _lifespan, description=title, kept_bytes=_kept_bytes)


def _kept_bytes(settings: WorkerConfig) -> int:
    return IMAGE_AT_WORK_BYTES if settings.codec_idle_s is None else 0


def build(settings: WorkerConfig, engine: WorkerEngineClient, pool: CodecPool) -> tuple[Server, Worker]:
    """Create a worker and its server without starting them. Call it in a running event loop."""
    server = Server("worker", settings.server)
    addons = load_front_addons()
    worker = Worker(
        settings,
        engine=engine,
        pool=pool,
        metrics=WorkerMetrics(server.registry),
        server=server,
        addons=addons,
    )
    WorkerService(worker).add_to(server.grpc)
    server.add_services([SERVICE_NAME])
    add_link_service(server, worker.kind, worker)
    for addon in addons:
        addon.add_rpcs(server, functools.partial(engine.ask, addon.kind))
    return server, worker


@contextlib.asynccontextmanager
async def _lifespan(settings: WorkerConfig) -> AsyncIterator[ServiceHooks]:
    try:
        check_model(settings)  # before an engine imports torch only to find that it cannot load the model
        if is_single_file(settings.engine.model) or single_vae(settings.engine) is not None:
            settings = replace(settings, engine=await _imported(settings.engine))
            check_model(settings)
    except ConfigError as error:
        if not settings.gateway:
            raise
        yield _refusing(settings, error)
        return
    # The processes come first, so that the engine loads its model while the rest starts.
    timeouts = EngineTimeouts(start_stall_s=settings.start_stall_s, hang_s=settings.hang_s, stall_s=settings.stall_s)
    engine = WorkerEngineClient(_with_socket(settings.engine), timeouts=timeouts)
    pool = CodecPool(
        processes=settings.codec_processes,
        deadline_s=settings.codec_deadline_s,
        idle_s=settings.codec_idle_s,
        max_waiting=settings.max_attempts * (_IMAGES_PER_ATTEMPT + 1),
    )
    try:
        await engine.spawn()
        await pool.start()
        server, worker = build(settings, engine, pool)
        yield ServiceHooks(
            server=server, warm_up=worker.start, failed=worker.failed, finish=worker.drain, shut_down=worker.stop
        )
    finally:
        await asyncio.gather(engine.stop(), pool.stop())


async def _imported(engine: EngineConfig) -> EngineConfig:
    """Return a configuration that names the folders that are made from the single files of the given one."""
    systemd = SystemdNotifier(os.environ)
    systemd.extend_start(f"converting {engine.model}", within_s=CONVERSION_S)
    state, vae = service_state(), single_vae(engine)
    if vae is not None and not is_single_file(engine.model):
        folder = await import_vae_for_serving(vae, state, report_on_model(engine).family)
        return replace(engine, vae=replace(engine.vae, folder=str(folder)))
    file = Path(engine.model)
    imported = await import_for_serving(file, state, engine.prediction_type, vae)
    if imported.prediction_is_guess:
        _log.info("%s", imported.summary, extra={"model": str(file)})
    name = engine.model_name or name_of(str(file.with_suffix("")))
    own = replace(engine.vae, folder="") if vae is not None else engine.vae
    return replace(engine, model=str(imported.folder), model_name=name, vae=own)


def _refusing(settings: WorkerConfig, error: ConfigError) -> ServiceHooks:
    """Return a service that only tells the fleet why the worker cannot serve its model, and then fails with `error`."""
    server = Server("worker", settings.server)
    membership: FleetMembership | None = None

    async def warm_up() -> None:
        nonlocal membership
        engine = settings.engine
        model = name_of(engine.model, engine.model_name)
        load = fleet_pb2.Load(left_out=rules.report_left_out(engine.kind, {model: error.message}))
        registration = registration_of(server, kind=engine.kind, name=settings.name_in_fleet(server.identity))
        membership = FleetMembership(settings.gateway, registration, load=lambda: load, channels=server.channels)
        membership.start()
        with contextlib.suppress(TimeoutError):  # without a gateway the reason appears only on stderr
            async with asyncio.timeout(_JOIN_S):
                await membership.joined.wait()
            await asyncio.sleep(REPORT_INTERVAL_S)
        raise error

    async def shut_down() -> None:
        if membership is not None:
            await membership.stop()

    return ServiceHooks(server=server, warm_up=warm_up, shut_down=shut_down)


def _with_socket(engine: EngineConfig) -> EngineConfig:
    """Fill in the path of the unix socket for other workers. All engine processes use the same path."""
    links_group()  # raises now, rather than at the first connection, if the configured group does not exist
    if not (engine.peer.address or engine.kind != kinds.WORKER) or engine.links.socket != "":
        return engine
    return replace(engine, links=replace(engine.links, socket=str(default_socket_path(engine.kind))))


if __name__ == "__main__":
    sys.exit(main())
