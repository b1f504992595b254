"""One service of a suite as a process: started, read, started again by a restart policy when it dies, stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bottega.background_tasks import BackgroundTasks
from bottega.client.suite.plan import ProcessPlan
from bottega.client.suite.service_log import OutputPipe, ServiceLog, fields_of, lines_of
from bottega.errors import BottegaError, Code, ConfigError

# For what a process that has ended wrote last.
_READ_REST_S = 1.0


class DoesNotStart(BottegaError):
    """A service died several times before it served once.

    last_lines: of its log.
    """

    code = Code.FAILED_PRECONDITION

    def __init__(self, name: str, message: str, *, last_lines: Sequence[str]) -> None:
        super().__init__(message)
        self.name = name
        self.last_lines = tuple(last_lines)


class ServiceListener(Protocol):
    """The interface for news of services."""

    def starting(self, name: str, progress: str) -> None:
        """A service takes long to start, and is so far, such as "loading unet, 3.1 of 5.1 GB"."""

    def serving(self, name: str, address: str) -> None:
        """A service serves, for the first time or again."""

    def died(self, name: str, how: str, wait_s: float) -> None:
        """A service died and will be started again after `wait_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How a dead service is started again.

    first_wait_s, longest_wait_s: the wait doubles from one to the other.
    steady_s: one that ran so long starts over with the first wait.
    tries: deaths before it ever served, after which it is given up.
    stop_grace_s: from SIGTERM to SIGKILL; above the drain that the services are configured with.
    """

    first_wait_s: float = 0.5
    longest_wait_s: float = 30.0
    steady_s: float = 60.0
    tries: int = 3
    stop_grace_s: float = 10.0


class ServiceProcess:
    """A service that is kept running until it is stopped."""

    def __init__(self, plan: ProcessPlan, logs: Path, listener: ServiceListener, policy: RestartPolicy) -> None:
        self.name = plan.name
        self.pid: int | None = None
        """Of its process now, or None between two."""
        self.progress = ""
        """How far it is, where its start takes long; empty when it serves."""
        self.serving = asyncio.Event()
        self._plan = plan
        self._listener = listener
        self._policy = policy
        self._log = ServiceLog(logs, plan.name)
        self._last_lines: deque[str] = deque(maxlen=12)
        self._ever_served = False

    async def run(self) -> None:
        """Keeps the service running until cancelled. Raises DoesNotStart with its last lines."""
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
        """Ends its process now, with all of its children."""
        if self.pid is not None:
            _end_group(self.pid)

    def _give_up_if_due(self, status: int, deaths: int) -> None:
        """Raise DoesNotStart where another try would not help, or where there were enough of them."""
        what = f"{self.name} does not start: "
        if status == ConfigError.exit_status:
            what += "its configuration cannot be used"
        elif deaths >= self._policy.tries:
            what += f"it {_how_it_ended(status)}, and did so {deaths} times"
        else:
            return
        raise DoesNotStart(self.name, what, last_lines=self._last_lines)

    async def _run_once(self) -> int:
        """Run the process until it ends, and return its status."""
        with OutputPipe() as pipe, _stdin_of_supervisor() as stdin:
            process = await self._start(stdin, pipe.write_end)
            self.pid = process.pid
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
                # Its group is gone, so the pipe ends; an unrelated process that inherited it must not hold us up.
                await reading.join(_READ_REST_S)
                await reading.cancel()

    async def _start(self, stdin: int, output: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *self._plan.argv,
            stdin=stdin,
            stdout=output,
            stderr=output,
            env={**os.environ, **self._plan.environment},
            # Its own group: a Ctrl-C in the terminal reaches us alone, and its children can be ended with it.
            start_new_session=True,
        )

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
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
                self._listener.starting(self.name, self.progress)
            if fields.get("event") == "serving":
                self._ever_served, self.progress = True, ""
                self.serving.set()
                self._listener.serving(self.name, str(fields.get("address", "")))


@contextmanager
def _stdin_of_supervisor() -> Iterator[int]:
    """A stdin that says nothing and ends with this process, even if that is killed: nobody else has its other end."""
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
