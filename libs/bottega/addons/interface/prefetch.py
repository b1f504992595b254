"""Prefetching: lets services load items, such as LoRAs, before queued jobs need them.

Calls run in background tasks, one at a time for each service, so that a slow or lost service delays no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from prometheus_client import Counter

from bottega.addons.interface.views import Member
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError
from bottega.rpc.channel import Channels, Target
from bottega.rpc.status import from_rpc_error

# A service responds at once, and loads afterwards.
_DEADLINE_S = 2.0
# Pause between two calls to one service, whose report of what it loads arrives within that time.
_PAUSE_S = 0.2
# Limit on the names of one call in the .proto files. Further names are requested at the next look at the queue.
_MAX_NAMES = 256

_log = logging.getLogger(__name__)


class PrefetchClient(Protocol):
    """A client of one service that can prefetch. Its calls fail only with BottegaError."""

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Ask the service to load these items, in this order."""

    async def close(self) -> None:
        """End all calls."""


Call = Callable[[grpc.aio.Channel, Sequence[str], float], Awaitable[object]]
"""Asks a service over its channel to load items, within a deadline in seconds."""


class GrpcPrefetchClient:
    """The PrefetchClient of a service over gRPC, which connects and reconnects the channel."""

    def __init__(self, target: Target, channels: Channels, call: Call) -> None:
        self._channel = channels.open(target)
        self._call = call

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        try:
            await self._call(self._channel, names, deadline_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None

    async def close(self) -> None:
        await self._channel.close()


@dataclass(slots=True, kw_only=True)
class _ServiceQueue:
    """The names of items that one service still has to be asked to load."""

    client: PrefetchClient
    names: dict[str, None] = field(default_factory=dict)
    """Names in the order of requests, without duplicates; the values are unused."""
    sender: asyncio.Task[None] | None = None
    """The task that sends the requests; None if none is running."""


class ServicePrefetcher:
    """Queues of prefetch requests for all services of one kind.

    Args:
        kind: The kind of the services.
        connect: Makes the client of a service.
        calls: Counts the calls, by kind and outcome.
    """

    def __init__(self, kind: str, connect: Callable[[Target], PrefetchClient], calls: Counter) -> None:
        self._kind = kind
        self._connect = connect
        self._calls = calls
        self._queues: dict[Member, _ServiceQueue] = {}
        self._tasks = BackgroundTasks(f"prefetching of {kind}")

    def request(self, service: Member, names: Iterable[str]) -> None:
        """Queue items, given by name or digest, for a service to load. Does not wait."""
        queue = self._queues.get(service)
        if queue is None:
            queue = self._queues[service] = _ServiceQueue(client=self._connect(service.target))
        for name in names:
            if len(queue.names) < _MAX_NAMES:
                queue.names[name] = None
        if queue.names and (queue.sender is None or queue.sender.done()):
            queue.sender = self._tasks.start(self._send(service, queue))

    def remove(self, service: Member) -> None:
        """Drop the queue of a service that was lost."""
        queue = self._queues.pop(service, None)
        if queue is not None:
            if queue.sender is not None:
                queue.sender.cancel()
            self._tasks.start(queue.client.close())

    async def close(self) -> None:
        for service in list(self._queues):
            self.remove(service)
        await self._tasks.join()

    async def _send(self, service: Member, queue: _ServiceQueue) -> None:
        while queue.names:
            names, queue.names = list(queue.names), {}
            outcome = "failed"
            try:
                await queue.client.prefetch(names, deadline_s=_DEADLINE_S)
                outcome = "requested"
            except BottegaError as error:
                # The first job that needs it loads it.
                facts = {"member": service.name, "kind": self._kind, "text": error.message}
                _log.info("a service could not prefetch; items are loaded when a job needs them", extra=facts)
            finally:
                self._calls.labels(self._kind, outcome).inc()
            await asyncio.sleep(_PAUSE_S)
