"""What links ask of the devices of their process: the interface of bottega.device_links, which imports torch."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

from bottega.transport.channel.backend import Backend, ReceiverBackend, SenderBackend
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEndpoint:
    """The device in whose memory an end of a link receives messages, and sends them from.

    host: identity of the running system. device: of the device, the same for all processes. version: of what moves
    bytes; both ends must have the same one. backends: those that this end has.
    """

    host: str
    device: str
    version: str
    backends: tuple[Backend, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenConnections:
    """The connections of a link that is being opened, one for each direction. connecting: whether this end connected.

    limits: of what this end receives.
    """

    sending: socket.socket
    receiving: socket.socket
    connecting: bool
    limits: Limits


class DeviceLinks(Protocol):
    """One process's device, as links use it."""

    @property
    def endpoint(self) -> DeviceEndpoint:
        """What offers say of it."""
        ...

    def misfit(self, backend: Backend, listener: DeviceEndpoint) -> str:
        """Why a backend cannot carry a link to a listener, or nothing. It does not wait."""
        ...

    def open(
        self, backend: Backend, connections: ProvenConnections, deadline: Deadline
    ) -> tuple[SenderBackend, ReceiverBackend]:
        """Sets up both directions, while the other end does the same.

        Raises LinkError with the reason, and has closed the connections then.
        """
        ...

    def remember_failure(self, backend: Backend, listener: DeviceEndpoint, why: str) -> None:
        """A link to that listener came to nothing: `misfit` says so for a while, so that another backend is tried."""
        ...
