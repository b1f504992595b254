"""Where a service listens that has no server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeListening:
    """As a server says it."""

    address: str = "a:1"
    metrics_address: str = "a:2"
