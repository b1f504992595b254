"""Supervises the processes of a suite: starts them, logs their output, restarts those that die, and stops all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from asyncio.subprocess import Process
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from bottega.background_tasks import BackgroundTasks, run_until_first_ends
from bottega.client.instance import InstanceProcess, InstanceRecord, StateFolder
from bottega.client.sdk.clients import AsyncClient
from bottega.client.suite.plan import ProcessPlan, SuitePlan
from bottega.client.suite.service_log import OutputPipe, ServiceLog, fields_of, lines_of
from bottega.client.transport.calls import RetryPolicy
from bottega.client.types.fleet import FleetStatus
from bottega.errors import BottegaError, Code, ConfigError, DeadlinePassed, Unavailable
from bottega.process.fork_server import ForkedProcess, ForkOrder, ForkServer

# Seconds to read the last output of a process that has ended.
_READ_REST_S = 1.0
# Interval at which the fleet is asked for until the suite is ready.
_LOOK_S = 0.3


class DoesNotStart(BottegaError):
    """The error that a service died several times without having been ready."""

    code = Code.FAILED_PRECONDITION

    def __init__(self, name: str, message: str, *, last_lines: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.last_lines = tuple(last_lines)
        """The last lines of the service's log."""


class ServiceListener(Protocol):
    """The interface of an object that is told about events of services."""

    def starting(self, name: str, progress: str) -> None:
        """Handle the progress of a slow start, such as "loading unet, 3.1 of 5.1 GB"."""

    def serving(self, name: str, address: str) -> None:
        """Handle that a service became ready, for the first time or again."""

    def died(self, name: str, how: str, wait_s: float) -> None:
        """Handle that a service died, for the reason `how`. It will be restarted after `wait_s` seconds."""

    def not_forked(self, reason: str) -> None:
        """Handle that services are started as new interpreters from now on, because the fork server failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """The rules for restarting services that die."""

    first_wait_s: float = 0.5
    """Seconds before the first restart; the wait doubles with every further restart."""
    longest_wait_s: float = 30.0
    steady_s: float = 60.0
    """Running time in seconds after which the wait is `first_wait_s` again."""
    tries: int = 3
    """Deaths of a service that was never ready, after which the suite gives up."""
    stop_grace_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL: more than the time in which services are configured to drain."""


class Forking:
    """Forks the processes of a suite until the fork server fails, which it reports once."""

    def __init__(self, server: ForkServer, listener: ServiceListener) -> None:
        self._server: ForkServer | None = server
        self._listener = listener

    async def start(
        self, plan: ProcessPlan, environment: Mapping[str, str], *, stdin: int, output: int
    ) -> ForkedProcess | None:
        """Return a new fork; None if the process must be started as a new interpreter."""
        if self._server is None or not plan.fork_after_importing:
            return None
        _, _, module, *arguments = plan.argv
        try:
            order = ForkOrder(
                module=module,
                arguments=tuple(arguments),
                environment=environment,
                folder=str(Path.cwd()),  # raises if it was deleted
                imports=plan.fork_after_importing,
            )
            return await self._server.start(order, stdin=stdin, output=output)
        except OSError as error:
            if self._server is not None:  # no other service reported it meanwhile
                self._server = None
                self._listener.not_forked(str(error) or type(error).__name__)
            return None


class ServiceProcess:
    """A service that is restarted when its process dies, until it is stopped.

    Args:
        forking: Forks the process if the plan allows it; None starts new interpreters.
        on_change: Called when the process, its progress or `serving` changes.
    """

    def __init__(
        self,
        plan: ProcessPlan,
        logs: Path,
        listener: ServiceListener,
        policy: RestartPolicy,
        *,
        forking: Forking | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = plan.name
        self.pid: int | None = None
        """PID of the current process; None between two processes."""
        self.progress = ""
        """Progress of a slow start, as text; empty when the service is ready."""
        self.serving = asyncio.Event()
        self._plan = plan
        self._listener = listener
        self._policy = policy
        self._forking = forking
        self._on_change = on_change
        self._log = ServiceLog(logs, plan.name)
        self._last_lines: deque[str] = deque(maxlen=12)
        self._ever_served = False

    async def run(self) -> None:
        """Keep the service running until cancelled. Raise DoesNotStart if it dies too often."""
        deaths = 0
        try:
            while True:
                began_s = time.monotonic()
                status = await self._run_once()
                deaths = 1 if time.monotonic() - began_s > self._policy.steady_s else deaths + 1
                if not self._ever_served:
                    self._give_up_if_due(status, deaths)
                wait_s = min(self._policy.first_wait_s * 2 ** (deaths - 1), self._policy.longest_wait_s)
                self._listener.died(self.name, _how_it_ended(status), wait_s)
                await asyncio.sleep(wait_s)
        finally:
            self._log.close()

    def kill(self) -> None:
        """Kill the service's process and all of its children."""
        if self.pid is not None:
            _end_group(self.pid)

    def _give_up_if_due(self, status: int, deaths: int) -> None:
        """Raise DoesNotStart if a restart cannot help, or the service died too often."""
        what = f"{self.name} does not start: "
        if status == ConfigError.exit_status:
            what += "its configuration cannot be used"
        elif deaths >= self._policy.tries:
            what += f"it {_how_it_ended(status)}, {deaths} times"
        else:
            return
        raise DoesNotStart(self.name, what, last_lines=self._last_lines)

    async def _run_once(self) -> int:
        with OutputPipe() as pipe, _stdin_of_supervisor() as stdin:
            process = await self._start(stdin, pipe.write_end)
            self.pid = process.pid
            self._on_change()
            reading = BackgroundTasks(f"reading what {self.name} writes")
            reading.start(self._read(await pipe.reader()))
            try:
                return await process.wait()
            except asyncio.CancelledError:
                await self._stop(process)
                raise
            finally:
                _end_group(process.pid)
                self.pid = None
                self.serving.clear()
                self._on_change()
                # The pipe ends with the process group, unless an unrelated process inherited it.
                await reading.join(_READ_REST_S)
                await reading.cancel()

    async def _start(self, stdin: int, output: int) -> Process | ForkedProcess:
        environment = {**os.environ, **self._plan.environment}
        if self._forking is not None and (
            fork := await self._forking.start(self._plan, environment, stdin=stdin, output=output)
        ):
            return fork
        return await asyncio.create_subprocess_exec(
            *self._plan.argv,
            stdin=stdin,
            stdout=output,
            stderr=output,
            env=environment,
            # A group of its own: Ctrl-C in the terminal does not reach it, and its children can be killed with it.
            start_new_session=True,
        )

    async def _stop(self, process: Process | ForkedProcess) -> None:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._policy.stop_grace_s)
        except TimeoutError:
            _end_group(process.pid)
            await process.wait()

    async def _read(self, stream: asyncio.StreamReader) -> None:
        async for line in lines_of(stream):
            self._log.write(line)
            self._last_lines.append(line)
            fields = fields_of(line)
            if fields.get("event") == "engine starting":
                self.progress = str(fields.get("progress", ""))
                self._on_change()
                self._listener.starting(self.name, self.progress)
            if fields.get("event") == "serving":
                self._ever_served, self.progress = True, ""
                self.serving.set()
                self._on_change()
                self._listener.serving(self.name, str(fields.get("address", "")))


@contextlib.contextmanager
def _stdin_of_supervisor() -> Iterator[int]:
    """Yield a silent stdin that ends when this process ends, even if it is killed: only it has the write end."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


def _end_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _how_it_ended(status: int) -> str:
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"


class Supervisor:
    """Runs a suite from a state folder whose lock this process holds."""

    def __init__(
        self,
        plan: SuitePlan,
        state: StateFolder,
        listener: ServiceListener,
        policy: RestartPolicy | None = None,
        *,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._plan = plan
        self._state = state
        self._changed = asyncio.Event()
        self._written: InstanceRecord | None = None
        forking = Forking(fork_server, listener) if fork_server is not None else None
        self._processes = [
            ServiceProcess(
                process,
                state.logs,
                listener,
                policy or RestartPolicy(),
                forking=forking,
                on_change=self._changed.set,
            )
            for process in plan.processes
        ]

    async def run(self, stop: asyncio.Event, on_ready: Callable[[FleetStatus], None]) -> None:
        """Run the suite until `stop` is set, and end all of its processes.

        Args:
            stop: Set by the caller to end the suite.
            on_ready: Called once with the fleet, when every service is ready and all that join the fleet have joined
                it.

        Raises:
            DoesNotStart: A service died several times without having been ready.
        """
        services = (process.run() for process in self._processes)
        try:
            await run_until_first_ends(stop.wait(), self._watch(on_ready), *services)
        finally:
            self._state.forget()

    def kill_all(self) -> None:
        """Kill all processes that are still running."""
        for process in self._processes:
            process.kill()

    async def _watch(self, on_ready: Callable[[FleetStatus], None]) -> None:
        settings, no_retry = self._plan.settings, RetryPolicy(patience_s=0.0)
        async with AsyncClient(settings.address, fleet_address=settings.fleet_address, retry=no_retry) as client:
            while (fleet := await self._whole_fleet(client)) is None:
                self._record(ready=False)
                await asyncio.sleep(_LOOK_S)
        on_ready(fleet)
        while True:
            self._changed.clear()
            self._record(ready=True)
            await self._changed.wait()

    def _record(self, *, ready: bool) -> None:
        """Write the record of the suite to the state folder, if it has changed."""
        record = InstanceRecord(
            pid=os.getpid(),
            address=self._plan.settings.address,
            fleet_address=self._plan.settings.fleet_address,
            http_address=self._plan.http_address,
            ready=ready,
            starting=", ".join(
                f"{process.name}: {process.progress}" for process in self._processes if process.progress
            ),
            children=tuple(self._children()),
        )
        if record != self._written:
            self._state.write(record)
            self._written = record

    async def _whole_fleet(self, client: AsyncClient) -> FleetStatus | None:
        """Return the fleet if every service is ready, and all that join the fleet have reported; else None."""
        if not all(process.serving.is_set() for process in self._processes):
            return None
        try:
            fleet = await client.fleet()
        except (Unavailable, DeadlinePassed):
            return None
        joined = Counter(member.kind for member in fleet.members if member.reported)
        whole = all(joined[service.kind] >= count for service, count in self._plan.counts if service.joins)
        return fleet if whole else None

    def _children(self) -> Iterable[InstanceProcess]:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.pid is not None:
                    started_s = psutil.Process(process.pid).create_time()
                    yield InstanceProcess(name=process.name, pid=process.pid, started_s=started_s)
