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

Periodic checks end the leases of silent members, and fail jobs that no worker or add-on can serve. While all members
report, no check is due before a lease could end, so an idle gateway sleeps. When the lease of a member is about to end,
leases are checked every tenth of a second. If a check is late, it renews all leases, because the gateway itself was
stalled, not the services.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from bottega import kinds
from bottega.addons.interface.gateway_addon import PREFETCHED_JOBS, AddOn, AddOnContext, AddOnMetrics, PrefetchReason
from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock, SharedClock, seconds_until_tick
from bottega.codec import CodecPool
from bottega.errors import BottegaError, NoWorker, StorageUnavailable
from bottega.gateway.api.admission import Admission
from bottega.gateway.api.fleet_service import TARGETS_PATH, FleetNotServedHere, FleetService, scrape_targets
from bottega.gateway.api.image_service import ImageService
from bottega.gateway.api.webhook_service import WebhookService
from bottega.gateway.config import GatewayConfig, read_webhook_secrets
from bottega.gateway.dispatch.connection import WorkerClient
from bottega.gateway.fleet.join_limits import JoinBounds
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.conversion import version
from bottega.gateway.jobs.job import Job
from bottega.gateway.jobs.repository import JobRepository
from bottega.gateway.jobs.storage import Storage, create_job_store
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.scheduling.controller import JobController
from bottega.gateway.tenants import TenantAuthenticator, TenantTerms
from bottega.gateway.webhooks.delivery import WebhookDelivery
from bottega.gateway.webhooks.events import WebhookEvents
from bottega.manifest import load_object, read_services
from bottega.rpc.server import Server
from bottega.state_folder import state_folder
from bottega.storage import content_store
from bottega.v1 import fleet_pb2, fleet_pb2_grpc, image_pb2, image_pb2_grpc, webhook_pb2, webhook_pb2_grpc

# Seconds between two checks of the health. It is also checked when writing begins to fail or to work again.
_HEALTH_S = 1.0
# Upper bound on the wait of an input image for a codec process. An image that hangs its codec delays others as long.
_INSPECTION_WAIT_S = 20.0

# If a check is late by more seconds than this, this process was stalled, not its members.
_LATE_S = 0.5
# Seconds between two checks while the lease of a member is about to end, or after a check has failed.
_TICK_S = 0.1
# Rest of a lease from which on ticks are frequent: after a stall of this process, reports that came meanwhile are
# read before a member is removed.
_ABOUT_TO_END_S = 0.5
_QUEUE_S = 1.0
# Part of that after which the queue is due, because timers fire a moment earlier or later.
_ABOUT = 0.9
# Number of checks that fail within so many seconds before the gateway reports NOT_SERVING.
_MAX_FAULTS = 3
_FAULTS_S = 10.0

_log = logging.getLogger(__name__)


class Gateway:
    """The gateway process. Create it in a running event loop; `server` serves it between `warm_up` and `shut_down`."""

    def __init__(self, config: GatewayConfig) -> None:
        shared = SharedClock() if config.jobs else None
        clock = Clock(wall=shared) if shared else Clock()
        self._health = BackgroundTasks("health of the gateway")
        authenticator = TenantAuthenticator(Path(config.tenants), clock) if config.tenants else None
        terms = authenticator or TenantTerms(webhooks=read_webhook_secrets(config))
        self.server = Server("gateway", config.server, authenticator=authenticator)
        self.fleet_listener = self.server.beside(config.fleet, name="fleet")
        self._this = fleet_pb2.Registration(kind=kinds.GATEWAY, name=config.name, version=version())
        metrics = GatewayMetrics(self.server.registry, named_tenants=config.tenant_metrics)
        self.server.add_page(
            TARGETS_PATH, lambda: scrape_targets([self._this, *(member.registration for member in fleet.members())])
        )
        fleet = _fleet(config, metrics, clock)
        self._storage = _storage(config, metrics, clock, shared=shared)
        self._webhooks = WebhookDelivery(
            config=config.webhooks, storage=self._storage, terms=terms, metrics=metrics.webhooks, clock=clock
        )
        self._jobs = JobRepository(
            storage=self._storage,
            clock=clock,
            event_of=WebhookEvents(config.webhooks, terms, self._webhooks.has_room).event_of,
            on_end=self._webhooks.look,
        )
        addons = _addons(
            AddOnContext(
                fleet=fleet,
                metrics=AddOnMetrics(self.server.registry),
                clock=clock,
                channels=self.server.channels,
                live_jobs=self._jobs.live,
            )
        )
        self._controller = JobController(
            config=config,
            fleet=fleet,
            jobs=self._jobs,
            addons=addons,
            connect=functools.partial(WorkerClient, channels=self.server.channels),
            terms=terms,
            metrics=metrics,
            clock=clock,
        )
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
            storage=self._storage,
            addons=addons,
            inspector=self._codec,
            metrics=metrics,
        )
        images = ImageService(
            admission=admission,
            controller=self._controller,
            jobs=self._jobs,
            images=self._storage.images,
            fleet=fleet,
            traces=self._controller.traces,
            addons=addons,
            default_deadline_s=config.server.default_deadline_s,
        )
        image_pb2_grpc.add_ImageServiceServicer_to_server(images, self.server.grpc)
        # It refuses calls and names the right port. Without it, gRPC may end an unfinished Join with INTERNAL.
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(FleetNotServedHere(), self.server.grpc)
        self.server.add_services([image_pb2.DESCRIPTOR.services_by_name["ImageService"].full_name])
        members = FleetService(
            fleet=fleet,
            queue=self._controller.queue,
            demand=self._controller.demand,
            this=self._this,
            activity=metrics.activity,
            clock=clock,
        )
        fleet_pb2_grpc.add_FleetServiceServicer_to_server(members, self.fleet_listener.grpc)
        webhooks = WebhookService(self._webhooks, self._storage)
        webhook_pb2_grpc.add_WebhookServiceServicer_to_server(webhooks, self.fleet_listener.grpc)
        self.fleet_listener.add_services(
            [
                fleet_pb2.DESCRIPTOR.services_by_name["FleetService"].full_name,
                webhook_pb2.DESCRIPTOR.services_by_name["WebhookService"].full_name,
            ]
        )

    async def warm_up(self) -> None:
        """Start all parts of the gateway. Afterwards its health is SERVING, even if no worker has joined.

        This does not return while the disk is unusable. Until then, reads are answered as far as possible, and other
        calls are refused with the reason.
        """
        self._this.address, self._this.metrics_address = self.server.address, self.server.metrics_address
        starting = asyncio.create_task(self._codec.start())
        try:
            await self._storage.open(restore=self._restore, on_failure=self._jobs.allow_reads)
        finally:
            await starting
        self._storage.start(self._jobs.live_records)
        await self._webhooks.start()
        self._controller.start()
        self._periodic.start()
        self._health.start(self._keep_health())

    async def finish(self) -> None:
        """Refuse new jobs, wait until the running jobs have ended, and end the streams of the fleet."""
        await self._health.cancel()
        await self._controller.drain()

    async def shut_down(self) -> None:
        """Stop all parts that are still running."""
        await self._health.cancel()
        await self._periodic.stop()
        await self._controller.stop()
        await self._webhooks.stop()
        await self._storage.close()
        await self._codec.stop()

    async def _restore(self) -> None:
        began = time.perf_counter()
        jobs = await self._jobs.restore()
        self._controller.restore(jobs, seconds=time.perf_counter() - began)
        self._periodic.start_grace()

    async def _keep_health(self) -> None:
        """Set the health to SERVING while the disk can be written and the checks of fleet and queue run.

        When the disk can be written again, look for jobs that may have been stored when a write failed.
        """
        while True:
            writable = self._storage.trouble is None
            if writable and self._storage.changed.is_set():
                self._controller.scheduler.schedule_all()
            self._storage.changed.clear()
            await self.server.set_serving(writable and self._periodic.healthy)
            if writable:
                await self._resolve_doubtful()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._storage.changed.wait(), seconds_until_tick(_HEALTH_S))

    async def _resolve_doubtful(self) -> None:
        try:
            await self._jobs.resolve_doubtful()
        except StorageUnavailable as error:
            self._storage.report_failure(error)
        except Exception:  # noqa: BLE001 - the boundary of the task: without it health stays as it is, whatever happens
            _log.exception("looking for jobs that may have been stored failed; it is tried again")


def _addons(context: AddOnContext) -> tuple[AddOn, ...]:
    """Return the add-ons of the services in the manifest, in the order of the manifest. Raises ConfigError."""
    return tuple(load_object(service.add_on)(context) for service in read_services() if service.add_on)


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
    sizes = {"budget_bytes": config.results_bytes, "local_bytes": config.objects_local_bytes}
    images = content_store(folder / "images", config.objects, ttl_s=config.results_ttl_s, clock=clock, **sizes)
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


class PeriodicChecks:
    """Runs the checks of a gateway's fleet and queue. `start` them after the controller, and `stop` them before it.

    Args:
        worker_grace_s: Seconds for which jobs from before a restart wait for a worker of their model to join. The
            restarted gateway does not know yet how long such a worker takes to start.
    """

    def __init__(
        self,
        *,
        fleet: Fleet,
        controller: JobController,
        addons: Sequence[AddOn],
        worker_grace_s: float,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._controller = controller
        self._queue = controller.queue
        self._addons = addons
        self._worker_grace_s = worker_grace_s
        self._grace_until = 0.0
        self._clock = clock
        self._queue_due_at = -math.inf
        """Time of the next check of the queue, on the clock of the event loop."""
        self._checking = BackgroundTasks("checks of the fleet and the queue")
        self._publishing = BackgroundTasks("publishing of estimates")
        self._faults: deque[float] = deque(maxlen=_MAX_FAULTS)

    @property
    def healthy(self) -> bool:
        """Whether the checks run. A single failure does not count, several within seconds do."""
        faults = self._faults
        return len(faults) < _MAX_FAULTS or self._clock.monotonic() - faults[0] > _FAULTS_S

    def start_grace(self) -> None:
        """Start the time during which jobs from before a restart wait for a worker."""
        self._grace_until = self._clock.monotonic() + self._worker_grace_s

    def start(self) -> None:
        """Start the background checks."""
        self._checking.start(self._keep_checking())

    async def stop(self) -> None:
        """Stop the background checks. Does nothing if they were not started."""
        await self._checking.cancel()
        await self._publishing.cancel()

    async def _keep_checking(self) -> None:
        checked_at = self._clock.monotonic()
        while True:
            pause_s = self._pause_s()
            await asyncio.sleep(pause_s)
            # Since the check before, and not only while it slept: this process may be stopped anywhere.
            before, checked_at = checked_at, self._clock.monotonic()
            try:
                self._check(late_s=max(0.0, checked_at - before - pause_s))
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no lease ends, and no job starts
                _log.exception("the check of the fleet and the queue failed; it is tried again")
                self._faults.append(self._clock.monotonic())
                await asyncio.sleep(_QUEUE_S)  # what fails every time is not logged every time
                checked_at = self._clock.monotonic()

    def _pause_s(self) -> float:
        """Return the seconds until a lease is about to end or the queue has to be checked."""
        lease_s = self._fleet.lease_s
        quiet_s = self._fleet.shortest_lease_s() - min(_ABOUT_TO_END_S, lease_s / 2)
        return min(max(quiet_s, _TICK_S), seconds_until_tick(_QUEUE_S))

    def _check(self, *, late_s: float) -> None:
        if late_s > _LATE_S:
            _log.warning("the event loop was stalled; all leases are renewed", extra={"late_s": round(late_s, 3)})
            self._fleet.renew_leases()
            self._grace_until += late_s
            return  # read the pending reports before any member or job is given up
        self._fleet.expire()
        now = asyncio.get_running_loop().time()
        if now >= self._queue_due_at:
            self._queue_due_at = now + _ABOUT * _QUEUE_S
            if self._controller.has_jobs:
                self._fleet.wake_up()
            else:
                self._fleet.rest()
            self._check_queue()
            self._controller.demand.update()

    def _check_queue(self) -> None:
        in_grace = self._clock.monotonic() < self._grace_until
        for model in self._queue.models():
            if in_grace or self._fleet.expected(model):
                self._controller.scheduler.schedule(model)
                self._fail_all(self._controller.estimates.unmeetable(model))
                self._check_addons(model, in_grace=in_grace)
            else:
                retry_after_s = self._queue.retry_after_s()
                error = NoWorker(
                    f"no worker of model {model} joined within the grace period", retry_after_s=retry_after_s
                )
                self._fail_all((job, error) for job in self._queue.line(model))
        if not self._publishing:
            self._publishing.start(self._publish_estimates())

    def _check_addons(self, model: str, *, in_grace: bool) -> None:
        for addon in self._addons:
            addon.prefetch(list(itertools.islice(self._queue.line(model), PREFETCHED_JOBS)), PrefetchReason.NEXT)
            if not in_grace:
                waiting = self._queue.line(model)
                self._fail_all((job, error) for job in waiting if (error := addon.unavailable(job)) is not None)

    def _fail_all(self, failures: Iterable[tuple[Job, BottegaError]]) -> None:
        for job, error in list(failures):  # a copy, because failing a job removes it from the queue
            self._controller.fail(job, error)

    async def _publish_estimates(self) -> None:
        """Compute and publish estimates in a task of their own, because a long queue takes a while."""
        try:
            await self._controller.estimates.publish_all()
        except Exception:  # noqa: BLE001 - the boundary of the task
            _log.exception("computing the estimates of the queue failed; it is tried again")
            self._faults.append(self._clock.monotonic())
