"""PostgreSQL: a pool of connections, typed errors, schema migrations and notifications.

Import this module only where a `postgresql://` URL is configured: it needs the extra `postgresql`. Every wait has an
upper bound. The server ends slow statements, waits for locks, and transactions whose client is silent; if the server
itself does not answer, the socket is shut down, and the operation fails with StorageUnavailable.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import select
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bottega.errors import ConfigError, StorageUnavailable
from bottega.storage import os_errors
from bottega.storage.postgresql_errors import first_line, translated

# After postgresql_errors, which says what to install if psycopg is missing.
# isort: split
import psycopg
from psycopg import conninfo, sql
from psycopg.abc import Params
from psycopg.pq import TransactionStatus
from psycopg_pool import AsyncConnectionPool

Connection = psycopg.AsyncConnection[tuple[Any, ...]]

# The oldest server that the tests run against.
_MIN_SERVER = 150_000
_CONNECT_S = 3.0
# A caller waits so long for a connection; also the time after which the pool gives up an attempt to connect, so that
# the next caller begins a new one without the pool's exponential backoff.
_POOL_WAIT_S = 3.0
_POOL_RETRY_S = 1.0
_MAX_WAITING = 4096
# Maximum duration of one statement. Even if each statement takes 2 s, the scheduler keeps its lease, and transactions
# either work or fail with a status.
_STATEMENT_S = 5.0
_LOCK_S = 3.0
# Bound on a statement outside transactions, on this side.
_ANSWER_S = 6.0
# A process that is frozen inside a transaction keeps its locks for so long: less than the scheduler's lease.
_SILENT_S = 2.5
# The bound on a whole transaction, on this side: a frozen server or a cut network answers nothing.
_TRANSACTION_S = 10.0
_MIGRATION_S = 600.0
_GRANT = 'GRANT SELECT, INSERT ON bottega_migrations TO "USER"'
_LISTEN_RETRY_S = 0.5
# Seconds between two checks of the connection that listens.
_LISTEN_CHECK_S = 10.0
# First key of our advisory locks: "Bttg". The second one is a hash of what is locked.
_LOCK_KEY = 0x42747467
_PARAMETERS: dict[str, Any] = {
    "connect_timeout": int(_CONNECT_S),
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 8000,
    "client_encoding": "utf8",
}
_SETTINGS = {
    "statement_timeout": f"{_STATEMENT_S}s",
    "lock_timeout": f"{_LOCK_S}s",
    "idle_in_transaction_session_timeout": f"{_SILENT_S}s",
    "timezone": "UTC",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A step of a component's schema. Released steps never change."""

    statements: str
    """SQL statements, separated by semicolons."""
    oldest: int = 1
    """Number of the oldest step whose programs still work after this one; they may run during a rolling upgrade."""


class PostgresDatabase:
    """A pool of connections to one database.

    Args:
        url: A `postgresql://` URL. What it leaves out, such as the password, libpq takes from its environment variables
            (PGPASSWORD, PGPASSFILE) and files.
        application: Name that PostgreSQL shows for the connections, such as "bottega gateway".
        max_connections: Upper bound on the connections of the pool.
        settings: Values of PostgreSQL's parameters for each connection, such as those of an extension.

    Raises:
        ConfigError: If the URL is not valid.
    """

    def __init__(
        self, url: str, *, application: str, max_connections: int = 8, settings: Mapping[str, str] | None = None
    ) -> None:
        self._settings = {**_SETTINGS, **(settings or {})}
        self._conninfo = _parameters(url, application)
        self.place = _place_of(self._conninfo)
        """Host, port and name of the database, for messages."""
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._max_connections = max_connections
        self._opening = asyncio.Lock()

    async def open(self) -> None:
        """Connect. Callers may repeat this until it succeeds; it does nothing while the pool is open.

        Raises:
            ConfigError: If the server refuses the login, the database does not exist, or the server is too old.
            StorageUnavailable: If the server cannot be reached now.
        """
        async with self._opening:
            if self._pool is None:
                self._pool = await self._connected_pool()

    async def _connected_pool(self) -> AsyncConnectionPool[Connection]:
        with translated(self.place, starting=True):
            async with await self._connect() as connection:
                with _bounded(connection, _ANSWER_S):
                    await self._check(connection)
        # The pool logs every failed attempt to connect, several a second; callers report failures once.
        logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
        pool = AsyncConnectionPool[Connection](
            self._conninfo,
            kwargs={"autocommit": True},
            min_size=1,
            max_size=self._max_connections,
            open=False,
            configure=self._configure,
            check=_check_alive,
            timeout=_POOL_WAIT_S,
            max_waiting=_MAX_WAITING,
            reconnect_timeout=_POOL_RETRY_S,
            name=self.place,
        )
        await pool.open()
        return pool

    async def close(self) -> None:
        """Close all connections, once their operations have ended."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close(timeout=_TRANSACTION_S)

    @property
    def waiting(self) -> int:
        """Number of operations that wait for a connection."""
        return self._pool.get_stats().get("requests_waiting", 0) if self._pool is not None else 0

    @contextlib.asynccontextmanager
    async def connection(self, *, limit_s: float = _TRANSACTION_S) -> AsyncIterator[Connection]:
        """Yield a connection on which every statement commits by itself. Raise StorageUnavailable and DataLoss.

        Args:
            limit_s: Upper bound on the seconds of the block, after which the connection is cut.
        """
        if self._pool is None:
            raise os_errors.unavailable("the database is not open", cause=os_errors.NOT_OPEN)
        with translated(self.place):
            task = asyncio.current_task()
            cancelled = task.cancelling() if task is not None else 0
            async with self._pool.connection() as connection:
                # The pool waits by wait_for, which in Python 3.11 swallows a cancellation at the wrong moment.
                if task is not None and task.cancelling() > cancelled:
                    raise asyncio.CancelledError
                with _bounded(connection, limit_s):
                    yield connection

    @contextlib.asynccontextmanager
    async def transaction(self, *, limit_s: float = _TRANSACTION_S) -> AsyncIterator[Connection]:
        """Yield a connection in a transaction, which is durable after the block. Otherwise as `connection`."""
        async with self.connection(limit_s=limit_s) as connection, connection.transaction():
            yield connection

    async def fetch(self, query: str, parameters: Params = ()) -> list[tuple[Any, ...]]:
        """Return all rows of one statement, which commits by itself. Raise StorageUnavailable and DataLoss."""
        async with self.connection() as connection:
            return await rows_of(connection, query, parameters)

    async def migrate(self, component: str, migrations: Sequence[Migration]) -> None:
        """Apply the migrations of a component that the database does not have yet. Does nothing after the last one.

        Several processes may call this at the same time.

        Raises:
            ConfigError: If the schema is from a version that is too new for this program, or rights are missing.
        """
        create = 'GRANT CREATE ON SCHEMA public TO "USER"'
        with self.rights(f"{create}; if another user has made bottega_migrations, also {_GRANT}"):
            if await self._applied(component, migrations) == len(migrations):
                return
            async with self.transaction(limit_s=_MIGRATION_S) as connection:
                await connection.execute(f"SET LOCAL statement_timeout = '{_MIGRATION_S}s'")
                await lock(connection, "migrations")
                await connection.execute(
                    "CREATE TABLE IF NOT EXISTS bottega_migrations (component text, version integer, oldest integer "
                    "NOT NULL, applied timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (component, version))"
                )
                applied = await self._version(connection, component, migrations)
                for version, migration in enumerate(migrations[applied:], applied + 1):
                    await connection.execute(migration.statements.encode())
                    await connection.execute(
                        "INSERT INTO bottega_migrations VALUES (%s, %s, %s)", (component, version, migration.oldest)
                    )

    async def has_schema(self, component: str, migrations: Sequence[Migration]) -> bool:
        """Return whether the database has tables of the component.

        Raises:
            ConfigError: If the schema is from a version that is too new for this program, or rights are missing.
        """
        with self.rights('GRANT SELECT ON bottega_migrations TO "USER"'):
            return await self._applied(component, migrations) > 0

    @contextlib.contextmanager
    def rights(self, remedy: str) -> Iterator[None]:
        """Raise ConfigError with a remedy if the database's user lacks rights for the statements in the block."""
        try:
            yield
        except StorageUnavailable as error:
            if error.metadata.get("cause") != psycopg.errors.InsufficientPrivilege.__name__:
                raise
            why = first_line(error.__cause__ if isinstance(error.__cause__, Exception) else error)
            user = conninfo.conninfo_to_dict(self._conninfo).get("user") or "USER"
            remedy = remedy.replace("USER", str(user))
            raise ConfigError(f"the database {self.place}: {why}; let its owner run {remedy}") from error

    async def listen(self, channel: str) -> AsyncGenerator[str]:
        """Yield the payloads of notifications, and "" after each connection, because some may have been missed before.

        It has a connection of its own, which is opened again whenever it is lost. The iterator never ends by itself:
        close it (contextlib.aclosing).
        """
        lost = False
        while True:
            try:
                async with await self._connect() as connection:
                    with _bounded(connection, _ANSWER_S):
                        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
                    if lost:
                        _log.info("notifications of the database come again", extra={"database": self.place})
                    lost = False
                    yield ""
                    while True:
                        async for notification in connection.notifies(timeout=_LISTEN_CHECK_S):
                            yield notification.payload
                        with _bounded(connection, _ANSWER_S):
                            await connection.execute("SELECT")
            except (psycopg.Error, OSError) as error:
                if not lost:
                    facts = {"database": self.place, "text": first_line(error)}
                    _log.warning("notifications of the database do not come; it is tried again", extra=facts)
                lost = True
            await asyncio.sleep(_LISTEN_RETRY_S)

    async def _connect(self) -> Connection:
        connection = await psycopg.AsyncConnection.connect(self._conninfo, autocommit=True)
        try:
            await self._configure(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _configure(self, connection: Connection) -> None:
        """Set the parameters of a session. A commit waits for the disk, even if the user's default says otherwise."""
        settings = [value for pair in self._settings.items() for value in pair]
        calls = ", ".join(["set_config(%s, %s, false)"] * len(self._settings))
        durable = "set_config('synchronous_commit', 'on', false)"
        query = f"SELECT {calls}, CASE current_setting('synchronous_commit') WHEN 'off' THEN {durable} END"
        with _bounded(connection, _ANSWER_S):
            await connection.execute(query.encode(), settings)

    async def _check(self, connection: Connection) -> None:
        version = connection.info.server_version
        if version < _MIN_SERVER:
            raise ConfigError(f"the database {self.place} is PostgreSQL {version // 10_000}; 15 or newer is needed")
        query = "SELECT current_setting('server_encoding'), current_setting('fsync')"
        ((encoding, fsync),) = await rows_of(connection, query)
        if encoding != "UTF8":
            raise ConfigError(f"the database {self.place} has the encoding {encoding}; create it with UTF8")
        if fsync == "off":
            _log.warning(
                "PostgreSQL runs without fsync: a crash of its machine loses data", extra={"database": self.place}
            )

    async def _applied(self, component: str, migrations: Sequence[Migration]) -> int:
        async with self.connection() as connection:
            ((exists,),) = await rows_of(connection, "SELECT to_regclass('bottega_migrations') IS NOT NULL")
            return await self._version(connection, component, migrations) if exists else 0

    async def _version(self, connection: Connection, component: str, migrations: Sequence[Migration]) -> int:
        query = (
            "SELECT coalesce(max(version), 0), coalesce(max(oldest), 0) FROM bottega_migrations WHERE component = %s"
        )
        ((version, oldest),) = await rows_of(connection, query, (component,))
        if oldest > len(migrations):
            raise ConfigError(
                f"the database {self.place} has schema {version} of {component}, from a newer version of Bottega; this "
                f"version knows schema {len(migrations)}: upgrade it"
            )
        return min(int(version), len(migrations))


async def lock(connection: Connection, name: str) -> None:
    """Take an exclusive lock of that name in the database until the end of the transaction."""
    call, values = lock_call(name)
    await connection.execute(f"SELECT {call}".encode(), values)


def lock_call(name: str, *, waits_long: bool = False) -> tuple[str, tuple[int, str]]:
    """Return expressions of SQL that take the lock as `lock` does, and their parameters.

    Args:
        waits_long: Whether only the bound on a statement limits the wait, and those of the rest of the transaction.
    """
    unlimited = "set_config('lock_timeout', '0', true), " if waits_long else ""
    return f"{unlimited}pg_advisory_xact_lock(%s, hashtext(%s))", (_LOCK_KEY, name)


async def rows_of(connection: Connection, query: str, parameters: Params = ()) -> list[tuple[Any, ...]]:
    """Return all rows of a statement; none if it returns no rows. The text never contains values of callers."""
    cursor = await connection.execute(query.encode(), parameters)
    return await cursor.fetchall() if cursor.description else []


def refuse_password(url: str) -> None:
    """Raise ConfigError if the URL of a command's argument has a password."""
    if re.match(r"\w+://[^/@]*:[^/@]*@", url) or "password=" in url:
        raise ConfigError(
            "other users of this machine see a command's arguments: leave the password out of the URL, and give it by "
            "PGPASSWORD or by a file (PGPASSFILE)"
        )


def _parameters(url: str, application: str) -> str:
    if not url.startswith(("postgresql://", "postgres://")):
        raise ConfigError("the URL of a database begins with postgresql://")
    try:
        given = conninfo.conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        # libpq's text repeats what it could not read, which may be the password.
        raise ConfigError("the URL of the database cannot be read: postgresql://USER@HOST:PORT/NAME") from error
    if not all(port.isdecimal() for port in str(given.get("port", "5432")).split(",")):
        raise ConfigError("the URL of the database has a port that is no number")
    if "@" in f"{given.get('host', '')}{given.get('dbname', '')}":  # a part of the password, which would be shown
        raise ConfigError("the URL of the database has an @ in its user or password: write %40 for @, and %2F for /")
    # Of several hosts, the one that can be written is used.
    standby = {"target_session_attrs": "read-write"} if "," in str(given.get("host", "")) else {}
    return conninfo.make_conninfo("", **{"application_name": application, **_PARAMETERS, **standby, **given})


def _place_of(parameters: str) -> str:
    given = conninfo.conninfo_to_dict(parameters)
    host = given.get("host") or os.environ.get("PGHOST") or "local"
    port = given.get("port") or os.environ.get("PGPORT") or "5432"
    name = given.get("dbname") or os.environ.get("PGDATABASE") or given.get("user") or "default"
    return f"{host}:{port}/{name}"


async def _check_alive(connection: Connection) -> None:
    """Raise OperationalError if the server has closed the connection; costs no round trip while it is open."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if poll.poll(0) or connection.info.transaction_status != TransactionStatus.IDLE:
        with _bounded(connection, _ANSWER_S):
            await connection.execute("SELECT")


@contextlib.contextmanager
def _bounded(connection: Connection, limit_s: float) -> Iterator[None]:
    """Cut the connection if the block takes longer. To cancel the block would wait for an answer of the server."""
    cut = asyncio.get_running_loop().call_later(limit_s, _cut, connection)
    try:
        yield
    finally:
        cut.cancel()


def _cut(connection: Connection) -> None:
    """Shut down the socket of a connection, so that the operation that waits on it fails."""
    _log.warning("PostgreSQL does not answer; the connection is cut")
    with contextlib.suppress(OSError, psycopg.Error):
        duplicate = socket.socket(fileno=os.dup(connection.fileno()))
        with duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
