"""The gateway process: it creates the parts of the gateway, starts them, drains them and stops them.

    state      event                           next state
    starting   the store is open               serving
    serving    SIGTERM                         draining: no new jobs; running jobs may end within the grace period
    draining   all jobs have ended, or the     stopped; the other jobs are in the store
               grace period is over
    dead       started again                   starting; waiting jobs are queued again. Jobs that were running wait a
                                               moment for the worker that still runs them (AttemptRecovery), and
                                               continue there even if it reconnects later, unless another attempt was
                                               started. IDs contain the number of the gateway's start, so that no ID is
                                               used twice
    serving    the disk cannot be written      paused: nothing is accepted or dispatched; finished images stay in
                                               memory until they can be written (jobs/storage.py)
    follower   it gets the scheduler's lease   starting, as after a restart (sharing.py)
    serving    SIGTERM, jobs are shared        stopped; another gateway goes on with the jobs at once

A follower is a gateway that shares its jobs with others and is not their scheduler: it reads ended jobs and admits new
ones by itself, and forwards other calls about jobs (api/forwarding.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from bottega import kinds
from bottega.addons.interface.gateway_addon import AddOn, AddOnContext, AddOnMetrics
from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock, SharedClock, seconds_until_tick
from bottega.codec.pool import CodecPool
from bottega.errors import BottegaError, ConfigError, StorageUnavailable
from bottega.gateway.api.admission import Admission
from bottega.gateway.api.fleet_service import TARGETS_PATH, FleetNotServedHere, FleetService, scrape_targets
from bottega.gateway.api.following import FollowerAdmission
from bottega.gateway.api.forwarding import ForwardingImageService, ForwardingWebhookService
from bottega.gateway.api.image_service import ImageService
from bottega.gateway.api.reservations import Reservations
from bottega.gateway.api.scheduler_calls import SchedulerCalls
from bottega.gateway.api.webhook_service import WebhookService
from bottega.gateway.config import GatewayConfig, read_webhook_secrets
from bottega.gateway.dispatch.worker_client import WorkerClient
from bottega.gateway.fleet.join_limits import JoinBounds
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.checkpoints import CHECKPOINT_NAMES, SharedCheckpoints
from bottega.gateway.jobs.conversion import version
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.storage import APPLICATION, Storage, create_job_store
from bottega.gateway.jobs.stored_jobs import StoredJobs
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.periodic_checks import PeriodicChecks
from bottega.gateway.scheduler_role import LeaseHolder, SchedulerRole
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.scheduling.stages import StageRoles
from bottega.gateway.tenants import TenantTerms, known_tenants
from bottega.gateway.webhooks.delivery import WebhookDelivery
from bottega.gateway.webhooks.events import WebhookEvents
from bottega.manifest import load_object, read_services
from bottega.rpc.address import is_any_host, split
from bottega.rpc.server import Server
from bottega.state_folder import state_folder
from bottega.storage import SharedContentStore, content_store
from bottega.storage.objects import s3_location
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, image_pb2_grpc, webhook_pb2, webhook_pb2_grpc

if TYPE_CHECKING:
    from bottega.gateway.jobs.store.postgresql import PostgresJobStore
    from bottega.gateway.sharing import SharedScheduling

# Seconds between two checks of the health. It is also checked when writing begins to fail or to work again.
_HEALTH_S = 1.0
# Upper bound on the wait of an input image for a codec process. An image that hangs its codec delays others as long.
_INSPECTION_WAIT_S = 20.0
# Seconds for which a new scheduler tries to use the jobs and images, before another gateway may.
_TAKEOVER_S = 10.0

_log = logging.getLogger(__name__)


class Gateway:
    """The gateway process. Create it in a running event loop; `server` serves it between `warm_up` and `shut_down`."""

    def __init__(self, config: GatewayConfig) -> None:
        shared = SharedClock() if config.jobs else None
        clock = Clock(wall=shared) if shared else Clock()
        self._health = BackgroundTasks("health of the gateway")
        authenticator = known_tenants(config.tenants, application=f"{APPLICATION}{config.name}", clock=clock)
        terms = self._terms = authenticator or TenantTerms(webhooks=read_webhook_secrets(config))
        self.server = Server("gateway", config.server, authenticator=authenticator)
        self.fleet_listener = self.server.beside(config.fleet, name="fleet")
        self._this = fleet_pb2.Registration(kind=kinds.GATEWAY, name=config.name, version=version())
        metrics = GatewayMetrics(self.server.registry, named_tenants=config.tenant_metrics)
        self.server.add_page(
            TARGETS_PATH, lambda: scrape_targets([self._this, *(member.registration for member in fleet.members())])
        )
        fleet = _fleet(config, metrics, clock)
        self._role = SchedulerRole()
        self._storage = _storage(config, metrics, clock, shared=shared)
        self._webhooks = WebhookDelivery(
            config=config.webhooks, storage=self._storage, terms=terms, metrics=metrics.webhooks, clock=clock
        )
        self._jobs = JobRepository(
            storage=self._storage,
            clock=clock,
            checkpoints=_checkpoints(config, metrics),
            event_of=WebhookEvents(config.webhooks, terms, self._webhooks.has_room).event_of,
            on_end=self._webhooks.look,
        )
        self._stored = StoredJobs(self._jobs)
        context = AddOnContext(
            fleet=fleet,
            metrics=AddOnMetrics(self.server.registry),
            clock=clock,
            channels=self.server.channels,
            live_jobs=self._jobs.live,
        )
        addons: list[AddOn] = [load_object(found.add_on)(context) for found in read_services() if found.add_on]
        addons.append(StageRoles(fleet, clock, grace_s=config.model_grace_s))
        self._controller = JobController(
            config=config,
            fleet=fleet,
            jobs=self._jobs,
            addons=addons,
            connect=functools.partial(
                WorkerClient, channels=self.server.channels, generation=lambda: self._role.generation
            ),
            terms=terms,
            metrics=metrics,
            clock=clock,
        )
        metrics.scheduler.set_function(lambda: self._jobs.restored and not self._role.lost)
        self._periodic = PeriodicChecks(
            fleet=fleet,
            controller=self._controller,
            addons=addons,
            worker_grace_s=config.model_grace_s,
            clock=clock,
        )
        self._codec = CodecPool(
            processes=config.codec_processes, idle_s=config.codec_idle_s, max_wait_s=_INSPECTION_WAIT_S
        )
        admission = Admission(
            config=config,
            fleet=fleet,
            controller=self._controller,
            jobs=self._jobs,
            stored=self._stored,
            addons=addons,
            inspector=self._codec,
            metrics=metrics,
        )
        images = ImageService(
            admission=admission,
            controller=self._controller,
            jobs=self._jobs,
            stored=self._stored,
            fleet=fleet,
            traces=self._controller.traces,
            addons=addons,
            default_deadline_s=config.server.default_deadline_s,
        )
        self._advertised = config.advertised
        self._sharing = self._shared(config, fleet) if config.jobs else None
        self._calls = SchedulerCalls(self._role, self.server.channels, max_message_mib=config.server.max_message_mib)
        self._following = FollowerAdmission(admission=admission, jobs=self._jobs, calls=self._calls, role=self._role)
        self._reservations = Reservations(
            controller=self._controller, admission=admission, jobs=self._jobs, role=self._role
        )
        self._forwarding = ForwardingImageService(images, self._calls, self._jobs, self._following)
        image_pb2_grpc.add_ImageServiceServicer_to_server(
            self._forwarding if self._sharing else images, self.server.grpc
        )
        # It refuses calls and names the right port. Without it, gRPC may end an unfinished Join with INTERNAL.
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetNotServedHere(), self.server.grpc)
        self.server.add_services([image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name])
        members = FleetService(
            fleet=fleet,
            controller=self._controller,
            this=self._this,
            activity=metrics.activity,
            clock=clock,
            scheduler=self._scheduler_lease,
            at_scheduler=self._calls.list_members,
            reservations=self._reservations,
        )
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(members, self.fleet_listener.grpc)
        webhooks = WebhookService(self._webhooks, self._storage)
        webhook_pb2_grpc.add_WebhookServiceServicer_to_server(
            ForwardingWebhookService(webhooks, self._calls) if self._sharing else webhooks,
            self.fleet_listener.grpc,
        )
        services = fleet_pb2.DESCRIPTOR.services_by_name, webhook_pb2.DESCRIPTOR.services_by_name
        self.fleet_listener.add_services([service.full_name for found in services for service in found.values()])

    @property
    def failed(self) -> asyncio.Future[BottegaError] | None:
        """Gets an error when the process has to end, because another gateway has become the scheduler."""
        return self._sharing.failed if self._sharing else None

    async def warm_up(self) -> None:
        """Start all parts of the gateway. Afterwards its health is SERVING, even if no worker has joined.

        This does not return while the disk is unusable. Until then, reads are answered as far as possible, and other
        calls are refused with the reason. A gateway that shares its jobs is ready when there is a scheduler.
        """
        self._this.address, self._this.metrics_address = self.server.address, self.server.metrics_address
        starting = asyncio.create_task(self._codec.start())
        try:
            await self._terms.start()
            if self._sharing is None:
                await self._begin()
            else:
                self._calls.start()
                self._periodic.start()
                await self._sharing.start(*self._addresses_for_gateways())
                if not self._role.held and isinstance(self._storage.images, SharedContentStore):
                    await self._storage.images.clear_local()  # a follower neither reads nor sweeps them
        finally:
            await starting
        if self._sharing is None:
            self._periodic.start()
        self._health.start(self._keep_health())

    async def finish(self) -> None:
        """Refuse new jobs, wait until the running jobs have ended, and end the streams of the fleet.

        If the jobs are shared, another gateway goes on with them at once, except those that end with their callers.
        """
        await self._health.cancel()
        if self._sharing is None:
            await self._controller.drain()
            return
        if not self._role.held:
            await self._sharing.release()  # so that this gateway takes no lease any more
        try:
            if self._role.serves:
                await self._controller.wait_for_callers()
        finally:
            self._controller.hand_over()
            self._calls.drain()
            await self._webhooks.stop()
            await self._jobs.close()
            await self._sharing.release()

    async def shut_down(self) -> None:
        """Stop all parts that are still running."""
        await self._health.cancel()
        if self._sharing is not None:
            await self._sharing.close()  # first: it may be about to start the other parts
        await self._following.close()
        await self._forwarding.close()
        await self._reservations.close()
        await self._periodic.stop()
        await self._controller.stop()
        await self._webhooks.stop()
        await self._calls.close()
        await self._terms.close()
        await self._storage.close()
        await self._codec.stop()

    async def _begin(self, lease: LeaseHolder | None = None) -> None:
        """Read the jobs, and start to schedule them; with the scheduler's lease if they are shared."""
        if lease is not None:
            self._storage.follows = False
            cast("PostgresJobStore", self._storage.jobs).fence(lease.generation, lease.address)
            self._stored.share_page_tokens(lease.page_token_key)
        within_s = math.inf if lease is None else _TAKEOVER_S
        await self._storage.open(restore=self._restore, on_failure=self._jobs.allow_reads, within_s=within_s)
        self._storage.start(self._jobs.live_records)
        await self._webhooks.start()
        self._controller.start()

    async def _follow(self, scheduler: LeaseHolder) -> None:
        """Make the jobs readable while another gateway is the scheduler."""
        try:
            await cast("PostgresJobStore", self._storage.jobs).follow()
        except BottegaError:
            self._jobs.refuse_reads()
            raise
        self._stored.share_page_tokens(scheduler.page_token_key)
        self._storage.follows = not self._role.held
        self._jobs.allow_reads()

    def _shared(self, config: GatewayConfig, fleet: Fleet) -> SharedScheduling:
        from bottega.gateway.sharing import shared_scheduling  # it needs psycopg, which is an extra

        return shared_scheduling(
            *(config, self._role),
            storage=self._storage,
            begin=self._begin,
            follow=self._follow,
            announce=fleet.wake_streams,
        )

    def _scheduler_lease(self) -> fleet_pb2.SchedulerLease | None:
        """Return who the scheduler is, for members of the fleet; None if this gateway shares its jobs with no other."""
        if self._sharing is None:
            return None
        lease = fleet_pb2.SchedulerLease()
        if (holder := self._role.holder) is not None:
            lease.generation, lease.name = holder.generation, holder.name
        return lease

    def _addresses_for_gateways(self) -> tuple[str, str]:
        """Return host:port of both ports for other gateways. Raises ConfigError if it is unknown."""
        public, fleet = self._advertised or self.server.address, self.fleet_listener.address
        if is_any_host(public):
            raise ConfigError("advertised: name the host:port at which other gateways reach this one's server.listen")
        return public, f"{public.rpartition(':')[0]}:{split(fleet)[1]}" if is_any_host(fleet) else fleet

    async def _restore(self) -> None:
        began = time.perf_counter()
        jobs, checkpoints = self._jobs.restore(), self._jobs.checkpoints
        restored = await (jobs if checkpoints is None else checkpoints.restore(jobs, self._jobs.live))
        self._controller.restore(restored, seconds=time.perf_counter() - began)
        self._periodic.start_grace()

    async def _keep_health(self) -> None:
        """Set the health to SERVING while the gateway can store jobs, reach the scheduler and check keys.

        Its periodic checks have to run, too.
        When the disk can be written again, look for jobs that may have been stored when a write failed.
        """
        while True:
            writable = self._storage.trouble is None
            if writable and self._storage.changed.is_set():
                self._controller.scheduler.schedule_all()
            self._storage.changed.clear()
            healthy = self._periodic.healthy and self._calls.reaches_scheduler and self._terms.valid
            await self.server.set_serving(writable and healthy)
            if writable:
                await self._resolve_doubtful()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds_until_tick(_HEALTH_S)):
                    await self._storage.changed.wait()

    async def _resolve_doubtful(self) -> None:
        try:
            await self._jobs.resolve_doubtful()
        except StorageUnavailable as error:
            self._storage.report_failure(error)
        except Exception:  # noqa: BLE001 - the boundary of the task: without it health stays as it is, whatever happens
            _log.exception("looking for jobs that may have been stored failed; it is tried again")


def _fleet(config: GatewayConfig, metrics: GatewayMetrics, clock: Clock) -> Fleet:
    bounds = JoinBounds(
        max_members=config.max_members,
        max_members_per_peer=config.fleet.max_members_per_peer,
        joins_per_s=config.fleet.joins_per_s,
        joins_per_s_by_name=config.fleet.joins_per_s_by_name,
    )
    fleet = Fleet(lease_s=config.lease_s, model_grace_s=config.model_grace_s, bounds=bounds, clock=clock)
    metrics.register_members(lambda: (member.kind for member in fleet.members()))
    return fleet


def _storage(config: GatewayConfig, metrics: GatewayMetrics, clock: Clock, *, shared: SharedClock | None) -> Storage:
    folder = Path(config.state) if config.state else state_folder() / "gateway"
    jobs = create_job_store(folder, config.jobs, name=config.name, clock=shared, on_commit=metrics.commit_s.observe)
    images = content_store(
        *(folder / "images", config.objects, config.objects_public_endpoint),
        ttl_s=config.results_ttl_s,
        clock=clock,
        budget_bytes=config.results_bytes,
        local_bytes=config.objects_local_bytes,
    )
    storage = Storage(
        folder=folder,
        jobs=jobs,
        images=images,
        max_jobs=config.max_jobs,
        jobs_bytes=config.jobs_bytes,
        jobs_ttl_s=config.jobs_ttl_s,
        waiting_bytes=2 * config.max_result_bytes,
        steady=shared,
    )
    metrics.store_waiting.set_function(lambda: jobs.waiting)
    metrics.store_in_trouble.set_function(lambda: storage.trouble is not None)
    metrics.image_bytes.set_function(lambda: images.size_bytes)
    metrics.image_budget_bytes.set(images.budget_bytes)
    return storage


def _checkpoints(config: GatewayConfig, metrics: GatewayMetrics) -> SharedCheckpoints | None:
    """Return the checkpoints in the bucket; None if there is none. Raises ConfigError if obstore is missing."""
    if not config.objects:
        return None
    from bottega.storage.s3 import S3Objects  # it needs obstore, which is an extra

    objects = S3Objects(s3_location(f"{config.objects}/checkpoints"), names=CHECKPOINT_NAMES)
    return SharedCheckpoints(objects, outcomes=metrics.checkpoints)
