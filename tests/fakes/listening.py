"""Where a service listens that has no server."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.rpc.channel import PLAINTEXT, Channels
from bottega.rpc.security.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeListening:
    """As a server says it."""

    address: str = "a:1"
    metrics_address: str = "a:2"
    channels: Channels = PLAINTEXT
    identity: Identity | None = None
