"""Puts one gateway together: who knows whom, and in which order they start and stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from pathlib import Path

from bottega import kinds
from bottega.codec import CodecPool
from bottega.errors import StorageUnavailable
from bottega.gateway.addons.controlnets.client import GrpcControlNetClient
from bottega.gateway.addons.controlnets.placement import ControlNetPlacement
from bottega.gateway.addons.controlnets.prefetch import ControlNetPrefetcher
from bottega.gateway.addons.loras.client import GrpcLoraClient
from bottega.gateway.addons.loras.resolver import LoraResolver
from bottega.gateway.api.admission import Admission
from bottega.gateway.api.fleet_service import FleetNotServedHere, FleetService
from bottega.gateway.api.image_service import ImageService
from bottega.gateway.clock import Clock
from bottega.gateway.config import GatewayConfig
from bottega.gateway.dispatch.dispatcher import Dispatcher
from bottega.gateway.dispatch.worker_client import GrpcWorkerClient
from bottega.gateway.fleet.join_limits import JoinBounds
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.provenance import version
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store import SqliteJobStore
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.scheduling.queue import JobQueue
from bottega.rpc.server import Server
from bottega.state_folder import state_folder
from bottega.storage import ContentStore
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, image_pb2_grpc
from bottega.v1.controlnet_pb2 import HostedState

# How often health is told anew, beside whenever it changes.
_HEALTH_S = 1.0
# For an input image to be looked at: so long one that hangs its codec may hold up the others.
_INSPECTION_WAIT_S = 20.0

_log = logging.getLogger(__name__)


class Gateway:
    """One gateway. Made in a running event loop; `server` serves it between `warm_up` and `shut_down`."""

    def __init__(self, config: GatewayConfig) -> None:
        clock = Clock()
        self._changed = asyncio.Event()
        self._telling: asyncio.Task[None] | None = None
        self.server = Server("gateway", config.server)
        self.fleet_listener = self.server.beside(config.fleet, name="fleet")
        self._this = fleet_pb2.Registration(kind=kinds.GATEWAY, name=config.name, version=version())
        metrics = GatewayMetrics(self.server.registry)
        fleet = Fleet(
            lease_s=config.lease_s,
            model_grace_s=config.model_grace_s,
            bounds=JoinBounds(
                max_members=config.max_members,
                max_members_per_peer=config.fleet.max_members_per_peer,
                joins_per_s=config.fleet.joins_per_s,
                joins_per_s_by_name=config.fleet.joins_per_s_by_name,
            ),
            clock=clock,
        )
        placement = ControlNetPlacement(fleet=fleet, clock=clock)
        self._loras = LoraResolver(connect=GrpcLoraClient, fleet=fleet)
        _watch_controlnets(fleet, metrics)
        self._storehouse = storehouse = _storehouse(config, metrics, clock)
        self._jobs = log = JobRepository(storage=storehouse, clock=clock)
        queue = JobQueue(max_jobs=config.max_queued, budget_bytes=config.max_queued_bytes, clock=clock)
        self._codec = CodecPool(processes=config.codec_processes, max_wait_s=_INSPECTION_WAIT_S)
        self._foreman = JobController(
            fleet=fleet,
            dispatcher=Dispatcher(
                connect=GrpcWorkerClient,
                placement=placement,
                loras=self._loras,
                storehouse=storehouse,
                max_result_bytes=config.max_result_bytes,
            ),
            placement=placement,
            prefetcher=ControlNetPrefetcher(connect=GrpcControlNetClient, placement=placement, metrics=metrics),
            lora_sizes=self._loras.sizes,
            queue=queue,
            log=log,
            metrics=metrics,
            max_attempts=config.max_attempts,
            patience_s=config.model_grace_s,
            hold_s=config.hold_s,
            clock=clock,
        )
        intake = Admission(
            fleet=fleet,
            loras=self._loras,
            foreman=self._foreman,
            queue=queue,
            log=log,
            storehouse=storehouse,
            inspector=self._codec,
            metrics=metrics,
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            clock=clock,
        )
        images = ImageService(
            intake=intake,
            foreman=self._foreman,
            log=log,
            images=storehouse.images,
            fleet=fleet,
            default_deadline_s=config.server.default_deadline_s,
        )
        image_pb2_grpc.add_ImageServiceServicer_to_server(images, self.server.grpc)
        # It refuses, and says where to go: without it gRPC may end a Join that is being written with INTERNAL.
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetNotServedHere(), self.server.grpc)
        self.server.add_services([image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name])
        members = FleetService(fleet=fleet, queue=queue, this=self._this, clock=clock)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(members, self.fleet_listener.grpc)
        self.fleet_listener.add_services([fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name])

    async def warm_up(self) -> None:
        """Starts what the gateway needs; its health says SERVING afterwards, whether or not workers are here.

        While its disk cannot be used it is not over, and what can be read is: whoever asks for more hears why.
        """
        self._this.address = self.server.address
        starting = asyncio.create_task(self._codec.start())
        try:
            await self._storehouse.open(
                restore=self._restore, on_failure=self._jobs.allow_reads, on_change=self._storage_changed
            )
        finally:
            await starting
        self._storehouse.start()
        self._foreman.start()
        self._loras.start(lambda: (digest for job in self._jobs.live() for digest in job.loras))
        self._telling = asyncio.create_task(self._tell_health())

    async def finish(self) -> None:
        """Takes no new jobs, waits for those that run, sends the fleet away."""
        await self._stop_telling()
        await self._foreman.finish()

    async def shut_down(self) -> None:
        """Ends whatever is left."""
        await self._stop_telling()
        await self._foreman.stop()
        await self._loras.close()
        await self._storehouse.close()
        await self._codec.stop()

    async def _restore(self) -> None:
        began = time.perf_counter()
        self._foreman.restore(await self._jobs.restore(self._foreman.submit), seconds=time.perf_counter() - began)

    def _storage_changed(self) -> None:
        well = self._storehouse.trouble is None
        self._foreman.pause(not well)
        self._changed.set()

    async def _tell_health(self) -> None:
        """The gateway serves while it can take jobs, and looks after them.

        What was doubtful is looked at when it can again.
        """
        while True:
            self._changed.clear()
            well = self._storehouse.trouble is None
            await self.server.set_serving(well and self._foreman.sound)
            if well:
                await self._settle_doubts()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _HEALTH_S)

    async def _settle_doubts(self) -> None:
        try:
            await self._jobs.resolve_doubtful()
        except StorageUnavailable as error:
            self._storehouse.report_failure(error)
        except Exception:  # noqa: BLE001 - the boundary of the task: without it health stays as it is, whatever happens
            _log.exception("jobs that may have been stored could not be looked for")

    async def _stop_telling(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
            self._telling = None


def _watch_controlnets(fleet: Fleet, metrics: GatewayMetrics) -> None:
    for state, number in HostedState.items()[1:]:
        name = state.removeprefix("HOSTED_STATE_").lower()
        metrics.watch_controlnets(name, functools.partial(fleet.hosting.count, number))


def _storehouse(config: GatewayConfig, metrics: GatewayMetrics, clock: Clock) -> Storage:
    folder = Path(config.state) if config.state else state_folder() / "gateway"
    jobs = SqliteJobStore(folder / "jobs.sqlite", on_commit=metrics.committed)
    metrics.watch_store(lambda: jobs.waiting)
    return Storage(
        folder=folder,
        jobs=jobs,
        images=ContentStore(
            folder / "images",
            budget_bytes=config.results_bytes,
            ttl_s=config.results_ttl_s,
            clock=clock.wall,
            monotonic=clock.monotonic,
        ),
        max_jobs=config.max_jobs,
        jobs_bytes=config.jobs_bytes,
        jobs_ttl_s=config.jobs_ttl_s,
        waiting_bytes=2 * config.max_result_bytes,
        clock=clock,
    )
