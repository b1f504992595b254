"""The lease of the scheduler: of several gateways that share their jobs in PostgreSQL, one schedules them at a time.

The lease is one row. Its generation rises with every takeover and fences writes: the job store refuses, in the same
transaction, what a gateway with an older generation writes. So a gateway that was frozen for longer than its lease
changes nothing when it wakes. The database's clock decides when the lease expires, not the clocks of the gateways.

The database may fail over to a standby. A standby that lacks the last takeover may count a generation twice, so writes
and renewals also name the address of their gateway. If its clock is behind, a lease whose end is further away than two
leases has expired, because no gateway renews for so long.

    role        event                                    next role
    follower    the lease has expired, or was released   scheduler, with the next generation
    follower    another gateway holds the lease          follower; looks again when it expires, and every second
    scheduler   a fifth of the lease has passed          scheduler; the lease is extended
    scheduler   another gateway has taken the lease      lost; the process has to end
    scheduler   `release`                                follower that never becomes the scheduler again
    scheduler   PostgreSQL cannot be reached for 15 s    lost: perhaps others can reach it, and one has the lease
    scheduler   it cannot use the pictures for 10 s      scheduler; asks for another that can
    follower    the scheduler asks, and it can use them  scheduler, with the next generation
    follower    PostgreSQL can be reached again          follower; takes no lease for a moment: the holder goes first
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from datetime import datetime

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, DataLoss, StorageUnavailable
from bottega.gateway.jobs.storage import Storage
from bottega.gateway.jobs.store.postgresql_schema import COMPONENT, MIGRATIONS
from bottega.gateway.scheduler_role import LeaseHolder, SchedulerRole
from bottega.storage.postgresql import Migration, PostgresDatabase

LEASE_S = 3.5
"""Seconds after its last renewal for which a gateway stays the scheduler.

A takeover takes less than 5 s: this, and the time to read the jobs. If each query takes 2 s, renewals still come in
time, because a fifth of the lease and 2 s are less.
"""
# Number of leases after which a lease cannot end, unless the database's clock was changed.
_LONGEST = 2
# Seconds between two looks of a follower, in case it missed a notification.
_LOOK_S = 1.0
# Seconds after the end of a lease at which a follower looks: it has ended by then.
_AFTER_END_S = 0.02
# Seconds between two tries while PostgreSQL cannot be reached.
_RETRY_S = 0.3
# Seconds for which the scheduler goes on while it cannot reach PostgreSQL: four leases, so that a restart of the
# database changes no scheduler. Jobs continue, but no end of a job can be written or told.
_CUT_OFF_S = 15.0
# Seconds without pictures after which the scheduler asks for another. Most disturbances are shorter, and a change of
# the scheduler interrupts calls.
_NO_PICTURES_S = 10.0
# Seconds within which a follower has to store a picture before it takes over from one that cannot.
_PROBE_S = 2.0

_CHANNEL = "bottega_scheduler"
# Every statement changes or reads the only row. No key has expires_at, so that a renewal does not wait for writes of
# jobs, which hold a key lock on the row; a takeover does, because it changes the key.
_MIGRATIONS = [
    Migration(
        statements="""
        CREATE TABLE scheduler_lease (
            generation bigint PRIMARY KEY,
            name text NOT NULL,
            address text NOT NULL,
            fleet_address text NOT NULL,
            expires_at timestamptz NOT NULL,
            page_token_key bytea NOT NULL
        );
        INSERT INTO scheduler_lease
        SELECT 0, '', '', '', clock_timestamp(), sha256((gen_random_uuid()::text || gen_random_uuid()::text)::bytea)
        """
    ),
    Migration(statements="ALTER TABLE scheduler_lease ADD COLUMN objects text NOT NULL DEFAULT ''"),
    Migration(statements="ALTER TABLE scheduler_lease ADD COLUMN asks_for_another boolean NOT NULL DEFAULT false"),
]
_LOOK = """
SELECT generation, name, address, fleet_address, objects, page_token_key, asks_for_another, expires_at,
    extract(epoch FROM expires_at - clock_timestamp())::float8
FROM scheduler_lease
"""
_TAKE = """
UPDATE scheduler_lease
SET generation = generation + 1, name = %(name)s, address = %(address)s,
    fleet_address = %(fleet_address)s, objects = %(objects)s, asks_for_another = false,
    expires_at = clock_timestamp() + make_interval(secs => %(lease_s)s)
WHERE expires_at <= clock_timestamp() OR expires_at > clock_timestamp() + make_interval(secs => %(longest_s)s)
    OR (asks_for_another AND %(asked)s)
RETURNING generation, page_token_key, pg_notify(%(channel)s, '')
"""
_RENEW = """
UPDATE scheduler_lease SET expires_at = clock_timestamp() + make_interval(secs => %s), asks_for_another = %s
WHERE generation = %s AND address = %s RETURNING generation
"""
_RELEASE = """
UPDATE scheduler_lease SET expires_at = clock_timestamp() WHERE generation = %s AND address = %s
RETURNING pg_notify(%s, '')
"""

_log = logging.getLogger(__name__)


class SchedulerLease:
    """The scheduler's lease, as one gateway sees and holds it. `start` it once the tables of the job store exist.

    Args:
        database: A database for the lease alone, so that a renewal never waits for a free connection.
        role: Is told who holds the lease.
        name: Name of this gateway.
        objects: Where the pictures of this gateway are; see LeaseHolder.
        lease_s: Seconds for which the lease lasts without a renewal.
        storage: The storage of this gateway; None if another gateway cannot use its pictures.

    Attributes:
        address: host:port under which other gateways reach the public port of this one; set it before `start`.
        fleet_address: The same for its port for services.
    """

    def __init__(
        self,
        database: PostgresDatabase,
        role: SchedulerRole,
        *,
        name: str,
        objects: str,
        lease_s: float = LEASE_S,
        storage: Storage | None = None,
    ) -> None:
        self._database = database
        self._role = role
        self._name = name
        self._objects = objects
        self._seen: tuple[int, datetime] | None = None
        """Generation and end of the lease at the last look."""
        self._lease_s = lease_s
        self._storage = storage
        self._asks = False
        self.address = self.fleet_address = ""
        self._released = False
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._unreachable = False
        self._reached_at = self._may_take_at = 0.0  # on the clock of the event loop
        self._tasks = BackgroundTasks("the scheduler's lease")

    async def start(self) -> None:
        """Make the table ready, and then hold or watch the lease in the background.

        Raises ConfigError if the jobs are of a newer version: this gateway could not replace the scheduler.
        """
        await self._database.open()
        await create_table(self._database)
        await self._database.has_schema(COMPONENT, MIGRATIONS)
        self._reached_at = asyncio.get_running_loop().time()
        self._tasks.start(self._keep())
        self._tasks.start(self._listen())

    async def release(self) -> None:
        """Let another gateway become the scheduler at once. This gateway never does again."""
        self._released = True
        async with self._turn:  # a renewal or a takeover that has begun comes first
            await self._release()

    async def _release(self) -> None:
        holder = self._role.holder
        if not self._role.held or holder is None:
            return
        try:
            await self._database.fetch(_RELEASE, (holder.generation, holder.address, _CHANNEL))
        except (StorageUnavailable, DataLoss) as error:
            _log.warning("the scheduler's lease could not be released; it expires", extra={"text": error.message})
        else:
            _log.info("the scheduler's lease was released", extra={"generation": holder.generation})
        self._role.set(None)
        self._wake.set()

    async def close(self) -> None:
        """Stop watching, and close the database."""
        await self._tasks.cancel()
        await self._database.close()

    async def _keep(self) -> None:
        while not self._role.lost:
            self._wake.clear()
            try:
                async with self._turn:
                    pause_s = await (self._renew() if self._role.held else self._look())
                self._note_reached()
            except (StorageUnavailable, DataLoss) as error:
                self._note_unreachable(error)
                pause_s = _RETRY_S
            except Exception:  # noqa: BLE001 - the boundary of the task: without it no gateway takes over
                _log.exception("reading the scheduler's lease failed; it is tried again")
                pause_s = _RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()

    def _note_reached(self) -> None:
        self._reached_at = asyncio.get_running_loop().time()
        if self._unreachable:
            self._unreachable = False
            _log.info("the scheduler's lease can be read again")

    def _note_unreachable(self, error: BottegaError) -> None:
        now = asyncio.get_running_loop().time()
        if not self._unreachable:
            self._unreachable = True
            _log.warning("the scheduler's lease cannot be read; retrying", extra={"text": error.message})
        self._may_take_at = now + self._lease_s / 2
        if self._role.held and now - self._reached_at > _CUT_OFF_S:
            _log.error("PostgreSQL could not be reached for %g s; another gateway may be the scheduler", _CUT_OFF_S)
            self._role.set(None, lost=True)

    async def _renew(self) -> float:
        """Extend the lease, and return the seconds until the next renewal."""
        holder = self._role.holder
        assert holder is not None
        asks = self._storage is not None and self._storage.images_failed_s >= _NO_PICTURES_S
        if asks and not self._asks:
            text = "pictures cannot be stored for %g s; a gateway that can store them is asked to become the scheduler"
            _log.error(text, _NO_PICTURES_S)
        self._asks = asks
        terms = (self._lease_s, asks, holder.generation, holder.address)
        if not await self._database.fetch(_RENEW, terms) and self._role.held:
            _log.error(
                "another gateway has become the scheduler; this one changes nothing any more, and ends",
                extra={"generation": holder.generation},
            )
            self._role.set(None, lost=True)
        return self._lease_s / 5

    async def _look(self) -> float:
        """Find out who the scheduler is, and take the lease if it is free. Return the seconds until the next look."""
        ((generation, name, address, fleet_address, objects, key, asks, end, left),) = await self._database.fetch(_LOOK)
        left_s = float(left) if left <= _LONGEST * self._lease_s else 0.0
        may_take = not self._released and asyncio.get_running_loop().time() >= self._may_take_at
        # The lease of a dead scheduler is taken at once, without a probe of the pictures that would take time.
        asked = asks and left_s > 0 and may_take and objects == self._objects and await self._can_store()
        if may_take and (left_s <= 0 or asked):
            terms = {
                "asked": asked,
                "name": self._name,
                "address": self.address,
                "fleet_address": self.fleet_address,
                "objects": self._objects,
                "lease_s": self._lease_s,
                "longest_s": _LONGEST * self._lease_s,
                "channel": _CHANNEL,
            }
            taken = await self._database.fetch(_TAKE, terms)
            if not taken:
                return 0.0  # another gateway was faster
            new = LeaseHolder(
                generation=int(taken[0][0]),
                name=self._name,
                address=self.address,
                fleet_address=self.fleet_address,
                objects=self._objects,
                page_token_key=bytes(taken[0][1]),
            )
            _log.info("this gateway is the scheduler", extra={"generation": new.generation, "after": name})
            self._role.set(new, held=True)
            return self._lease_s / 5
        before, self._seen = self._seen, (generation, end)
        if left_s > 0 and not (self._objects and objects == self._objects) and before in (None, self._seen):
            return min(left_s + _AFTER_END_S, _LOOK_S)  # perhaps it has died, and this gateway replaces it
        known = LeaseHolder(
            generation=generation,
            name=name,
            address=address,
            fleet_address=fleet_address,
            objects=objects,
            page_token_key=bytes(key),
        )
        holder = known if left_s > 0 else None
        if holder != self._role.holder:
            self._role.set(holder)
            if holder is not None and holder.name == self._name and holder.address != self.address:
                _log.warning("another gateway has this one's name; give each its own", extra={"other": holder.address})
        return min(left_s + _AFTER_END_S, _LOOK_S) if left_s > 0 else _RETRY_S

    async def _can_store(self) -> bool:
        """Return whether this gateway can store pictures, as the scheduler cannot."""
        if self._storage is None:
            return False
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._storage.images.probe()
        except (BottegaError, TimeoutError):
            return False
        return True

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._database.listen(_CHANNEL)) as notifications:
            async for _ in notifications:
                self._wake.set()


async def create_table(database: PostgresDatabase) -> None:
    """Create the table of the lease, unless it exists."""
    await database.migrate("scheduler_lease", _MIGRATIONS)
