"""The backends of links: sealed shared memory within a host, and sealed records over TCP between hosts."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from bottega.transport.backends.frame_stream import TcpReceiver, TcpSender
from bottega.transport.backends.memfd import MemfdReceiver, MemfdSender
from bottega.transport.backends.records import Records, SealKeys
from bottega.transport.channel.backend import Backend, Limits, ReceiverBackend, SenderBackend


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A connection on which both processes have proved that they know the offer's token."""

    connection: socket.socket
    keys: SealKeys | None = None
    """Keys that seal the connection; None if it is not sealed."""

    @property
    def records(self) -> Records | None:
        """Encrypts and decrypts the connection's bytes; None if it is not sealed."""
        return Records(self.keys) if self.keys is not None else None


def backend_ends(
    backend: Backend, sending: Proven, receiving: Proven, limits: Limits
) -> tuple[SenderBackend, ReceiverBackend]:
    """Return the sender and the receiver of this process.

    Args:
        limits: Limits on the messages that this process receives.
    """
    if backend == Backend.MEMFD:
        return MemfdSender(sending.connection), MemfdReceiver(receiving.connection, limits)
    return TcpSender(sending.connection, sending.records), TcpReceiver(receiving.connection, receiving.records)
