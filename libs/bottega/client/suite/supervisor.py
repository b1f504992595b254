"""Runs a planned suite until it is told to stop. Knows when it is ready; not how a process is kept."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable

import psutil

from bottega.client.sdk.aio import AsyncClient
from bottega.client.suite.plan import SuitePlan
from bottega.client.suite.service_process import RestartPolicy, ServiceListener, ServiceProcess
from bottega.client.suite.state import InstanceProcess, InstanceRecord, StateFolder
from bottega.client.transport.retry import RetryPolicy
from bottega.errors import DeadlinePassed, Unavailable
from bottega.v1 import fleet_pb2

# How often the record is brought up to date and, until it is ready, the fleet is looked at.
_LOOK_S = 0.3


class Supervisor:
    """A suite that runs from a state folder, which this process holds."""

    def __init__(
        self, plan: SuitePlan, state: StateFolder, reporter: ServiceListener, policy: RestartPolicy | None = None
    ) -> None:
        self._plan = plan
        self._state = state
        self._keepers = [
            ServiceProcess(service, state.logs, reporter, policy or RestartPolicy()) for service in plan.services
        ]

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Runs the suite until `stop`; then nothing of it is left.

        on_ready: called once, when the gateway serves and every worker and ControlNet server has joined it.
        Raises DoesNotStart when a service never serves.
        """
        keepers = [asyncio.create_task(keeper.run()) for keeper in self._keepers]
        watching = asyncio.create_task(self._watch(on_ready))
        stopping = asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait([*keepers, watching, stopping], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await _end([watching, stopping])
            await _end(keepers)
            self._state.forget()

    def hurry(self) -> None:
        """Ends what is still running, without grace."""
        for keeper in self._keepers:
            keeper.kill()

    async def _watch(self, on_ready: Callable[[], None]) -> None:
        written, ready = None, False
        async with self._client() as client:
            while True:
                if not ready and await self._all_joined(client):
                    ready = True
                    on_ready()
                record = InstanceRecord(
                    pid=os.getpid(),
                    address=self._plan.address,
                    fleet_address=self._plan.fleet_address,
                    ready=ready,
                    children=tuple(self._children()),
                )
                if record != written:
                    self._state.write(record)
                    written = record
                await asyncio.sleep(_LOOK_S)

    def _client(self) -> AsyncClient:
        address, fleet_address = self._plan.address, self._plan.fleet_address
        return AsyncClient(address, fleet_address=fleet_address, retry=RetryPolicy(patience_s=0.0))

    async def _all_joined(self, client: AsyncClient) -> bool:
        if not all(keeper.serving.is_set() for keeper in self._keepers):
            return False
        try:
            members = (await client.fleet()).members
        except (Unavailable, DeadlinePassed):
            return False
        joined = Counter(member.registration.kind for member in members)
        return (
            joined[fleet_pb2.SERVICE_KIND_WORKER] >= self._plan.workers
            and joined[fleet_pb2.SERVICE_KIND_CONTROLNET] >= self._plan.controlnet_servers
        )

    def _children(self) -> Iterable[InstanceProcess]:
        for keeper in self._keepers:
            if keeper.pid is not None and psutil.pid_exists(keeper.pid):
                yield InstanceProcess(
                    name=keeper.name, pid=keeper.pid, started_s=psutil.Process(keeper.pid).create_time()
                )


async def _end(tasks: Iterable[asyncio.Task[object]]) -> None:
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    # What they failed by has been raised by run() already, or came of being stopped.
    await asyncio.gather(*tasks, return_exceptions=True)
