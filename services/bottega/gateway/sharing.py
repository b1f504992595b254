"""Sharing of jobs with other gateways: one that gets the lease becomes the scheduler, and ends when it loses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, ConfigError, DataLoss, InternalError, StorageUnavailable, Unavailable
from bottega.gateway.config import DATABASE_SCHEMES, GatewayConfig
from bottega.gateway.jobs.storage import APPLICATION, Storage
from bottega.gateway.scheduler_lease import SchedulerLease
from bottega.gateway.scheduler_role import LeaseHolder, SchedulerRole
from bottega.rpc.security.tenant_table import TenantTable
from bottega.storage.postgresql import PostgresDatabase

# Seconds between two tries to reach PostgreSQL at the start.
_RETRY_S = 0.5
# Seconds after which a follower compares its clock with that of the database again.
_FOLLOW_S = 10.0

_log = logging.getLogger(__name__)


class SharedScheduling:
    """Follows the scheduler's lease, and makes this gateway the scheduler when it gets it.

    Args:
        objects: Where the pictures of this gateway are; see LeaseHolder.
        unread_tenants: The table of tenants in the same database if this gateway does not read it, else None.
        begin: Called with the lease of this gateway; reads the jobs and starts to schedule them.
        follow: Called with the scheduler now and then while that is another gateway; makes jobs readable here.
        announce: Called when another gateway has become the scheduler, or this one; tells the members of the fleet.

    Attributes:
        failed: Gets an error when this gateway has lost the lease or cannot use the jobs. The process then ends, and
            its supervisor starts it again as a follower. While PostgreSQL is away, the new process waits and is not
            healthy, so that no outage needs a person, however long it lasts.
    """

    def __init__(
        self,
        lease: SchedulerLease,
        role: SchedulerRole,
        *,
        objects: str,
        unread_tenants: TenantTable | None,
        begin: Callable[[LeaseHolder], Awaitable[None]],
        follow: Callable[[LeaseHolder], Awaitable[None]],
        announce: Callable[[], None],
    ) -> None:
        self._lease = lease
        self._role = role
        self._objects = objects
        self._unread_tenants = unread_tenants
        self._begin = begin
        self._follow_scheduler = follow
        self._announce = announce
        self.failed: asyncio.Future[BottegaError] = asyncio.get_running_loop().create_future()
        self._tasks = BackgroundTasks("following the scheduler")

    async def start(self, address: str, fleet_address: str) -> None:
        """Start, and return when calls can be answered: there is a scheduler, perhaps this gateway. Raises ConfigError.

        Args:
            address: host:port under which other gateways reach the public port of this one.
            fleet_address: The same for its port for services.
        """
        self._lease.address, self._lease.fleet_address = address, fleet_address
        if not self._objects:
            _log.warning(
                "jobs are in PostgreSQL, but pictures in this gateway's folder: no other gateway can go on with them",
                extra={"todo": "to use several gateways, set objects: s3://bucket/prefix"},
            )
        reported = False
        while True:
            try:
                await self._check_tenants()
                await self._lease.start()
                break
            except StorageUnavailable as error:
                if not reported:
                    facts = {"text": error.message, "why": str(error.__cause__ or "").partition("\n")[0]}
                    _log.error("the jobs cannot be used yet; retrying", extra=facts)
                reported = True
                await asyncio.sleep(_RETRY_S)
        self._tasks.start(self._follow())
        self._tasks.start(self._watch_loss())
        self._tasks.start(self._keep_following())
        while self._role.other is None and not self._role.serves:
            if self.failed.done():
                raise self.failed.result()
            await self._role.change()
        self._check_pictures()

    async def release(self) -> None:
        """Let another gateway become the scheduler. This one forwards all calls from now on."""
        await self._lease.release()

    async def close(self) -> None:
        """Stop following the lease."""
        await self._tasks.cancel()
        await self._lease.close()

    async def _follow(self) -> None:
        while not self.failed.done():
            self._announce()
            try:
                self._check_pictures()
            except ConfigError as error:
                self._fail(error)
            if self._role.held and not self._role.serves:
                await self._become_scheduler()
            else:
                await self._role.change()

    async def _check_tenants(self) -> None:
        """Raise ConfigError if the database has tenants, and this gateway has others, or none."""
        table = self._unread_tenants
        if table is None:
            return
        try:
            if await table.has_tenants():
                raise ConfigError(
                    f"tenants: the database {table.database.place} has tenants, which this gateway would not know; set "
                    "tenants to the URL of the database"
                )
        finally:
            await table.database.close()

    def _check_pictures(self) -> None:
        """Raise ConfigError if another gateway is the scheduler and the two do not share their pictures."""
        other = self._role.other
        if other is None or (self._objects and other.objects == self._objects):
            return
        own, others = (text or "none" for text in (self._objects, other.objects))
        raise ConfigError(
            f"objects: the gateway {other.name} at {other.address} has the same jobs, but other pictures (there: "
            f"{others}; here: {own}); set the same s3://bucket/prefix on all gateways, or stop the other gateway"
        )

    async def _become_scheduler(self) -> None:
        holder = self._role.holder
        assert holder is not None
        try:
            await self._begin(holder)
        except (StorageUnavailable, DataLoss) as error:
            _log.error(
                "this gateway cannot use the jobs and images; it lets another one become the scheduler, and ends",
                extra={"text": error.message},
            )
            await self._lease.release()
            self._fail(error)
        except BottegaError as error:
            self._fail(error)
        except Exception:  # noqa: BLE001 - the boundary of the task: a scheduler that does nothing is worse than none
            _log.exception("the jobs could not be read")
            self._fail(InternalError("the jobs could not be read; the log says why"))
        else:
            if self._role.held:
                self._role.set(holder, held=True, serves=True)

    async def _keep_following(self) -> None:
        reported = False
        while not self._role.held:
            pause_s = _FOLLOW_S
            try:
                if (scheduler := self._role.other) is not None:
                    await self._follow_scheduler(scheduler)
                    reported = False
            except BottegaError as error:
                if not reported:
                    text = "jobs cannot be read here, so that the scheduler answers all calls; it is tried again"
                    _log.warning(text, extra={"text": error.message})
                reported, pause_s = True, _RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._role.change()

    async def _watch_loss(self) -> None:
        while not self._role.lost:
            await self._role.change()
        self._fail(Unavailable("this gateway may not be the scheduler any more; it has to start again"))

    def _fail(self, error: BottegaError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        self._role.set(self._role.holder, held=self._role.held, lost=self._role.lost)


def shared_scheduling(
    config: GatewayConfig,
    role: SchedulerRole,
    *,
    storage: Storage,
    begin: Callable[[LeaseHolder], Awaitable[None]],
    follow: Callable[[LeaseHolder], Awaitable[None]],
    announce: Callable[[], None],
) -> SharedScheduling:
    """Return the sharing of jobs in the database that the configuration names; see SharedScheduling.

    Raises ConfigError.
    """
    reads_tenants = config.tenants.startswith(DATABASE_SCHEMES)
    if config.tenants and not reads_tenants:
        _log.warning(
            "every gateway with these jobs needs the same file of tenants; better, put them into the database: "
            "bottega tenants import FILE --file URL"
        )
    application, objects = f"{APPLICATION}{config.name}", config.objects
    database = PostgresDatabase(config.jobs, application=application, max_connections=1)
    return SharedScheduling(
        SchedulerLease(database, role, name=config.name, objects=objects, storage=storage if objects else None),
        role,
        objects=objects,
        unread_tenants=None if reads_tenants else TenantTable(config.jobs, application=application),
        begin=begin,
        follow=follow,
        announce=announce,
    )
