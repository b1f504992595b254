"""Has ControlNet servers load ahead what jobs in the queue will need.

Beside everything else: a server that is slow or gone holds up nobody, and costs one call at a time. Knows no wire.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bottega.errors import BottegaError
from bottega.gateway.addons.controlnets.placement import ControlNetPlacement
from bottega.gateway.fleet.members import Member
from bottega.gateway.jobs.job import Job
from bottega.gateway.metrics import GatewayMetrics

AHEAD = 8
"""The first jobs of a line, whose ControlNets are loaded ahead: those behind them would drive these out again."""

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
    """The way to a server. wanted: in order, each once. asking: while something is."""

    client: ControlNetClient
    wanted: dict[str, None] = field(default_factory=dict)
    asking: asyncio.Task[None] | None = None


class ControlNetPrefetcher:
    """connect: makes the client for an address."""

    def __init__(
        self, *, connect: Callable[[str], ControlNetClient], placement: ControlNetPlacement, metrics: GatewayMetrics
    ) -> None:
        self._connect = connect
        self._placement = placement
        self._metrics = metrics
        self._lines: dict[Member, _ServerQueue] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def ahead(self, jobs: Iterable[Job]) -> None:
        """These jobs wait, the first to run first. Returns at once."""
        for job in jobs:
            for server, name in self._placement.cold(job) if job.controlnets else ():
                self._want(server, name)

    def lose(self, member: Member) -> None:
        """The server is gone."""
        line = self._lines.pop(member, None)
        if line is not None:
            closing = asyncio.create_task(self._close(line))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Asks no more."""
        for member in list(self._lines):
            self.lose(member)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _want(self, server: Member, name: str) -> None:
        line = self._lines.get(server)
        if line is None:
            line = self._lines[server] = _ServerQueue(client=self._connect(server.registration.address))
        if len(line.wanted) < _MOST_NAMES:
            line.wanted[name] = None
        if line.asking is None:
            line.asking = asyncio.create_task(self._ask(server, line))

    async def _ask(self, server: Member, line: _ServerQueue) -> None:
        while line.wanted:
            names, line.wanted = list(line.wanted), {}
            try:
                await line.client.prefetch(names, deadline_s=_DEADLINE_S)
                self._metrics.prefetched("asked")
            except BottegaError as error:
                self._metrics.prefetched("failed")
                # It is loaded then when the first session needs it.
                _log.info("ControlNets are not prefetched", extra={"member": server.name, "text": error.message})
            except Exception:  # noqa: BLE001 - the boundary of the task: without it this server is never asked again
                self._metrics.prefetched("failed")
                _log.exception("ControlNets are not prefetched", extra={"member": server.name})
            await asyncio.sleep(_PAUSE_S)
        line.asking = None

    async def _close(self, line: _ServerQueue) -> None:
        if line.asking is not None:
            line.asking.cancel()
            await asyncio.gather(line.asking, return_exceptions=True)
        await line.client.close()
