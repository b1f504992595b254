"""The interface between links and the devices of their process. bottega.device_links implements it with torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

from bottega.transport.channel.backend import Backend, ReceiverBackend, SenderBackend
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEndpoint:
    """The device in whose memory one end of a link sends and receives messages."""

    host: str
    """Identity of the running system."""
    device: str
    """Identity of the device, the same for all processes."""
    version: str
    """Version of the software that moves bytes. Both ends must have the same."""
    backends: tuple[Backend, ...]
    """Backends that this end supports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenConnections:
    """The connections of a link that is being opened, one for each direction."""

    sending: socket.socket
    receiving: socket.socket
    connecting: bool
    """Whether this end connected."""
    limits: Limits
    """Limits of what this end receives."""


class DeviceLinks(Protocol):
    """The device of a process, as links use it."""

    @property
    def endpoint(self) -> DeviceEndpoint:
        """The endpoint that offers contain."""
        ...

    def misfit(self, backend: Backend, listener: DeviceEndpoint) -> str:
        """Return why a backend cannot carry a link to a listener, or "". It does not wait."""
        ...

    def open(
        self, backend: Backend, connections: ProvenConnections, deadline: Deadline
    ) -> tuple[SenderBackend, ReceiverBackend]:
        """Set up both directions, while the other end does the same.

        Raises LinkError with the reason; the connections are closed then.
        """
        ...

    def remember_failure(self, backend: Backend, listener: DeviceEndpoint, why: str) -> None:
        """Remember that a link to the listener failed. `misfit` reports it for a while."""
        ...
