"""Runs a planned suite until it is stopped, and reports when all of it is ready."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable

import psutil

from bottega.background_tasks import run_until_first_ends
from bottega.client.instance import InstanceProcess, InstanceRecord, StateFolder
from bottega.client.sdk.clients import AsyncClient
from bottega.client.suite.plan import SuitePlan
from bottega.client.suite.service_process import RestartPolicy, ServiceListener, ServiceProcess
from bottega.client.transport.retry import RetryPolicy
from bottega.client.types.fleet import FleetStatus
from bottega.errors import DeadlinePassed, Unavailable

# Interval at which the fleet is asked for until the suite is ready.
_LOOK_S = 0.3


class Supervisor:
    """A supervisor of a suite that runs from a state folder, whose lock this process holds."""

    def __init__(
        self, plan: SuitePlan, state: StateFolder, listener: ServiceListener, policy: RestartPolicy | None = None
    ) -> None:
        self._plan = plan
        self._state = state
        self._changed = asyncio.Event()
        self._written: InstanceRecord | None = None
        self._processes = [
            ServiceProcess(process, state.logs, listener, policy or RestartPolicy(), on_change=self._changed.set)
            for process in plan.processes
        ]

    async def run(self, stop: asyncio.Event, on_ready: Callable[[FleetStatus], None]) -> None:
        """Run the suite until `stop` is set, and end all of its processes.

        Args:
            stop: Ends the suite.
            on_ready: Called once with the fleet, when every service serves and all that join the fleet have joined it.

        Raises:
            DoesNotStart: A service died several times before it served.
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
        """Write the state of the suite if it has changed."""
        record = InstanceRecord(
            pid=os.getpid(),
            address=self._plan.settings.address,
            fleet_address=self._plan.settings.fleet_address,
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
        """Return the fleet when every service serves and all that join it have reported to it, else None."""
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
            if process.pid is not None and psutil.pid_exists(process.pid):
                started_s = psutil.Process(process.pid).create_time()
                yield InstanceProcess(name=process.name, pid=process.pid, started_s=started_s)
