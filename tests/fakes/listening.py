"""Where a service listens that has no server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bottega.rpc.channel import PLAINTEXT, Channels
from bottega.rpc.security.caller import Identity


async def _tell_nobody(_: bool) -> None:
    """As the health that nobody asks for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeListening:
    """As a server says it; what is told to systemd is for nobody."""

    address: str = "a:1"
    metrics_address: str = "a:2"
    channels: Channels = PLAINTEXT
    identity: Identity | None = None
    tell_health: Callable[[bool], Awaitable[None]] = _tell_nobody

    async def set_serving(self, serving: bool) -> None:
        await self.tell_health(serving)

    def extend_start(self, status: str, *, within_s: float) -> None:
        """See Server."""
