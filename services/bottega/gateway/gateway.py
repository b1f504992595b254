"""Puts one gateway together: who knows whom, and in which order they start and stop."""

from __future__ import annotations

from bottega.codec import CodecPool
from bottega.gateway.clock import Clock
from bottega.gateway.config import GatewayConfig
from bottega.gateway.dispatch import Dispatcher
from bottega.gateway.fleet import Fleet
from bottega.gateway.fleet_service import FleetService
from bottega.gateway.foreman import Foreman
from bottega.gateway.intake import Intake
from bottega.gateway.job_log import JobLog
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.provenance import version
from bottega.gateway.queueing import JobQueue
from bottega.gateway.results import ResultStore
from bottega.gateway.service import ImageService
from bottega.gateway.worker_client import GrpcWorkerClient
from bottega.rpc.server import Server
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, image_pb2_grpc


class Gateway:
    """One gateway. Made in a running event loop; `server` serves it between `warm_up` and `shut_down`."""

    def __init__(self, config: GatewayConfig) -> None:
        clock = Clock()
        self.server = Server("gateway", config.server)
        self._this = fleet_pb2.Registration(kind=fleet_pb2.SERVICE_KIND_GATEWAY, name=config.name, version=version())
        metrics = GatewayMetrics(self.server.registry)
        fleet = Fleet(lease_s=config.lease_s, model_grace_s=config.model_grace_s, clock=clock)
        log = JobLog(max_jobs=config.max_jobs, budget_bytes=config.jobs_bytes, ttl_s=config.jobs_ttl_s, clock=clock)
        queue = JobQueue(max_jobs=config.max_queued, budget_bytes=config.max_queued_bytes, clock=clock)
        results = ResultStore(budget_bytes=config.results_bytes, ttl_s=config.results_ttl_s, clock=clock)
        self._codec = CodecPool(processes=config.codec_processes)
        self._foreman = Foreman(
            fleet=fleet,
            dispatcher=Dispatcher(connect=GrpcWorkerClient, results=results, max_result_bytes=config.max_result_bytes),
            queue=queue,
            log=log,
            results=results,
            metrics=metrics,
            max_attempts=config.max_attempts,
            clock=clock,
        )
        intake = Intake(
            fleet=fleet,
            foreman=self._foreman,
            queue=queue,
            log=log,
            results=results,
            inspector=self._codec,
            metrics=metrics,
            max_image_bytes=config.max_image_bytes,
            max_image_pixels=config.max_image_pixels,
            clock=clock,
        )
        images = ImageService(intake=intake, foreman=self._foreman, log=log, results=results, fleet=fleet)
        image_pb2_grpc.add_ImageServiceServicer_to_server(images, self.server.grpc)
        members = FleetService(fleet=fleet, queue=queue, this=self._this, clock=clock)
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(members, self.server.grpc)
        self.server.add_services(
            [
                image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name,
                fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name,
            ]
        )

    async def warm_up(self) -> None:
        """Starts what the gateway needs; its health says SERVING afterwards, whether or not workers are here."""
        self._this.address = self.server.address
        self._foreman.start()
        await self._codec.start()

    async def finish(self) -> None:
        """Takes no new jobs, waits for the others, sends the fleet away."""
        await self._foreman.finish()

    async def shut_down(self) -> None:
        """Ends whatever is left."""
        await self._foreman.stop()
        await self._codec.stop()
