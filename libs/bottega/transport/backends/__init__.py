"""What carries links: sealed memory that two processes of one host share, and sealed records over TCP between hosts."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from bottega.transport.backends.memfd import MemfdReceiver, MemfdSender
from bottega.transport.backends.records import Records, SealKeys
from bottega.transport.backends.tcp import TcpReceiver, TcpSender
from bottega.transport.channel.backend import Backend, ReceiverBackend, SenderBackend
from bottega.transport.channel.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A connection whose ends have proved themselves. keys: by which it is sealed; None where it is not."""

    connection: socket.socket
    keys: SealKeys | None = None

    @property
    def records(self) -> Records | None:
        """What seals it."""
        return Records(self.keys) if self.keys is not None else None


def backend_ends(
    backend: Backend, sending: Proven, receiving: Proven, limits: Limits
) -> tuple[SenderBackend, ReceiverBackend]:
    """This process's ends of both directions. limits: of what it receives."""
    if backend == Backend.MEMFD:
        return MemfdSender(sending.connection), MemfdReceiver(receiving.connection, limits)
    return TcpSender(sending.connection, sending.records), TcpReceiver(receiving.connection, receiving.records)
