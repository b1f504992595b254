"""Tenants in a PostgreSQL database, which all gateways of a fleet follow. Needs the extra `postgresql`."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from bottega.background_tasks import BackgroundTasks
from bottega.clocks import Clock
from bottega.errors import BottegaError, ConfigError, DataLoss, StorageUnavailable, Unavailable
from bottega.gateway.tenants import KnownTenants
from bottega.rpc.security.tenant_table import CHANNEL, TenantTable

# Seconds between two looks for changes, in case a notification was missed.
_LOOK_S = 5.0
# Seconds without an answer of the database after which calls of tenants are refused: a key may have been revoked.
# Longer than a restart or failover of PostgreSQL takes.
_VALID_S = 60.0
# Seconds between two tries to read the tenants at the start.
_RETRY_S = 0.5

_log = logging.getLogger(__name__)


class DatabaseTenants(KnownTenants):
    """A CallAuthenticator for the tenants in a database, with their weights and quotas.

    Once they were read, they stay valid for `_VALID_S` while the database is away. Then calls of tenants are refused,
    and jobs and streams that have begun go on. Tenants that cannot be used replace none.

    Args:
        url: The URL of the database.
        application: Name that PostgreSQL shows for the connections.
        clock: The clock.
    """

    def __init__(self, url: str, *, application: str, clock: Clock) -> None:
        super().__init__(())
        self._clock = clock
        self._answered_at = clock.monotonic()
        self._table = TenantTable(url, application=application)
        self._readable = self._was_valid = True
        self._started = False
        self._wake = asyncio.Event()
        self._tasks = BackgroundTasks("following the tenants")

    @property
    def valid(self) -> bool:
        """Whether the database has answered recently."""
        return self._clock.monotonic() - self._answered_at <= _VALID_S

    async def start(self) -> None:
        """Read the tenants, and follow their changes. Wait while the database is away. Raises ConfigError."""
        while True:
            if await self._read(at_start=True):
                break
            await asyncio.sleep(_RETRY_S)
        self._started = True
        self._tasks.start(self._follow())
        self._tasks.start(self._listen())

    async def close(self) -> None:
        """Stop following the changes."""
        await self._tasks.cancel()
        await self._table.database.close()

    async def refresh(self) -> None:
        """Raise Unavailable until the tenants were read."""
        if not self._started:
            raise Unavailable("the gateway cannot read its tenants yet; retry", retry_after_s=_RETRY_S)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._wake.wait()
            self._wake.clear()
            await self._read()

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._table.database.listen(CHANNEL)) as notifications:
            async for _ in notifications:
                self._wake.set()

    async def _read(self, *, at_start: bool = False) -> bool:
        """Read the tenants if they have changed. Return whether that was possible."""
        try:
            tenants = await self._table.read_changed()
        except (ConfigError, StorageUnavailable, DataLoss) as error:
            if at_start and isinstance(error, ConfigError):
                raise ConfigError(f"tenants: {error.message}") from None
            if isinstance(error, ConfigError):
                self._answered_at = self._clock.monotonic()
            self._note_failure(error)
            return False
        except Exception:  # noqa: BLE001 - the boundary of the task: without it no change is seen any more
            _log.exception("reading the tenants failed; it is tried again")
            return False
        self._answered_at = self._clock.monotonic()
        if not self._readable:
            self._readable = self._was_valid = True
            _log.info("the tenants in the database can be read again")
        if tenants is not None:
            self.use(tenants)
            _log.info("the tenants were read from the database", extra={"tenants": len(tenants)})
        return True

    def _note_failure(self, error: BottegaError) -> None:
        if self._readable:
            self._readable = False
            text = "the tenants in the database cannot be read; those that were read before stay valid for now"
            _log.error(text, extra={"text": error.message})
        if self._started and self._was_valid and not self.valid:
            self._was_valid = False
            _log.error("the database of the tenants is away for %g s; calls of tenants are refused", _VALID_S)
