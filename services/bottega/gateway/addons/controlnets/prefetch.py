"""Asks ControlNet servers to load ahead what jobs in the queue will need.

In tasks of their own: a server that is slow or gone holds up nobody, and costs one call at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError
from bottega.gateway.fleet.members import Member
from bottega.gateway.metrics import GatewayMetrics

# A server answers at once, and loads afterwards.
_DEADLINE_S = 2.0
# Between two requests to one server: its report of what it loads comes sooner than that.
_PAUSE_S = 0.2
# Of one request, by the contract; what is beyond is asked for with the next look at the queue.
_MOST_NAMES = 256

_log = logging.getLogger(__name__)


class ControlNetClient(Protocol):
    """Calls to one ControlNet server. Every failure is a BottegaError."""

    async def prefetch(self, names: Sequence[str], *, deadline_s: float) -> None:
        """Has it load these, the most wanted first."""

    async def close(self) -> None:
        """Ends every call."""


@dataclass(slots=True, kw_only=True)
class _ServerQueue:
    """What one server is to load. names: in order, each once. sender: while something is requested."""

    client: ControlNetClient
    names: dict[str, None] = field(default_factory=dict)
    sender: asyncio.Task[None] | None = None


class ControlNetPrefetcher:
    """connect: makes the client of a server, from its address."""

    def __init__(self, *, connect: Callable[[str], ControlNetClient], metrics: GatewayMetrics) -> None:
        self._connect = connect
        self._metrics = metrics
        self._queues: dict[Member, _ServerQueue] = {}
        self._closing = BackgroundTasks("closing of ControlNet clients")

    def request(self, server: Member, name: str) -> None:
        """Has a server load a ControlNet. Returns at once."""
        queue = self._queues.get(server)
        if queue is None:
            queue = self._queues[server] = _ServerQueue(client=self._connect(server.registration.address))
        if len(queue.names) < _MOST_NAMES:
            queue.names[name] = None
        if queue.sender is None:
            queue.sender = asyncio.create_task(self._send(server, queue))

    def remove(self, server: Member) -> None:
        """The server is lost."""
        queue = self._queues.pop(server, None)
        if queue is not None:
            self._closing.start(self._close(queue))

    async def close(self) -> None:
        """Requests nothing more."""
        for server in list(self._queues):
            self.remove(server)
        await self._closing.join()

    async def _send(self, server: Member, queue: _ServerQueue) -> None:
        while queue.names:
            names, queue.names = list(queue.names), {}
            try:
                await queue.client.prefetch(names, deadline_s=_DEADLINE_S)
                self._metrics.prefetched("asked")
            except BottegaError as error:
                self._metrics.prefetched("failed")
                # It is loaded then when the first session needs it.
                _log.info("ControlNets are not prefetched", extra={"member": server.name, "text": error.message})
            except Exception:  # noqa: BLE001 - the boundary of the task: without it this server is never asked again
                self._metrics.prefetched("failed")
                _log.exception("ControlNets are not prefetched", extra={"member": server.name})
            await asyncio.sleep(_PAUSE_S)
        queue.sender = None

    async def _close(self, queue: _ServerQueue) -> None:
        if queue.sender is not None:
            queue.sender.cancel()
            await asyncio.gather(queue.sender, return_exceptions=True)
        await queue.client.close()
