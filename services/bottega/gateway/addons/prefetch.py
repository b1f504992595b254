"""Has services of one kind load ahead what jobs in the queue will need.

In tasks of their own: a service that is slow or gone holds up nobody, and costs one call at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError
from bottega.gateway.fleet.members import Member
from bottega.gateway.metrics import GatewayMetrics
from bottega.rpc.channel import Target

# A service answers at once, and loads afterwards.
_DEADLINE_S = 2.0
# Between two requests to one service: its report of what it loads comes sooner than that.
_PAUSE_S = 0.2
# Of one request, by the contracts; what is beyond is requested with the next look at the queue.
_MOST_NAMES = 256

_log = logging.getLogger(__name__)


class PrefetchClient(Protocol):
    """Calls to one service. Every failure is a BottegaError."""

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Has it load these, the most wanted first."""

    async def close(self) -> None:
        """Ends every call."""


@dataclass(slots=True, kw_only=True)
class _ServiceQueue:
    """What one service is to load. names: in order, each once. sender: while something is requested."""

    client: PrefetchClient
    names: dict[str, None] = field(default_factory=dict)
    sender: asyncio.Task[None] | None = None


class ServicePrefetcher:
    """kind: of the services. connect: makes the client of one."""

    def __init__(self, kind: str, connect: Callable[[Target], PrefetchClient], metrics: GatewayMetrics) -> None:
        self._kind = kind
        self._connect = connect
        self._metrics = metrics
        self._queues: dict[Member, _ServiceQueue] = {}
        self._tasks = BackgroundTasks(f"prefetching of {kind}")

    def request(self, service: Member, names: Iterable[str]) -> None:
        """Has a service load these, by the names or digests that it knows them by. Returns at once."""
        queue = self._queues.get(service)
        if queue is None:
            queue = self._queues[service] = _ServiceQueue(client=self._connect(service.target))
        for name in names:
            if len(queue.names) < _MOST_NAMES:
                queue.names[name] = None
        if queue.names and (queue.sender is None or queue.sender.done()):
            queue.sender = self._tasks.start(self._send(service, queue))

    def remove(self, service: Member) -> None:
        """The service is lost."""
        queue = self._queues.pop(service, None)
        if queue is not None:
            if queue.sender is not None:
                queue.sender.cancel()
            self._tasks.start(queue.client.close())

    async def close(self) -> None:
        """Requests nothing more."""
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
                # It is loaded then when the first job needs it.
                facts = {"member": service.name, "kind": self._kind, "text": error.message}
                _log.info("what jobs will need is not prefetched", extra=facts)
            finally:
                self._metrics.prefetches.labels(self._kind, outcome).inc()
            await asyncio.sleep(_PAUSE_S)
