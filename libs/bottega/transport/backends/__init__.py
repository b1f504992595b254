"""What carries links: sealed memory that two processes of one host share, and TCP between hosts."""

from __future__ import annotations

import socket

from bottega.transport.backends.memfd import MemfdReceiver, MemfdSender
from bottega.transport.backends.tcp import TcpReceiver, TcpSender
from bottega.transport.channel.backend import Backend, ReceiverBackend, SenderBackend
from bottega.transport.channel.limits import Limits


def backend_ends(
    backend: Backend, sending: socket.socket, receiving: socket.socket, limits: Limits
) -> tuple[SenderBackend, ReceiverBackend]:
    """This process's ends of both directions. limits: of what it receives."""
    if backend == Backend.MEMFD:
        return MemfdSender(sending), MemfdReceiver(receiving, limits)
    return TcpSender(sending), TcpReceiver(receiving)
