"""Accepts connections, which stay pending until their peers have proved that they know an offer's token.

One thread serves all of them and passes proven connections on. The cost of pending connections is bounded: in bytes by
the fixed lengths of the handshake, in time, and in number (the newest replaces the oldest).
"""

from __future__ import annotations

import hmac
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from bottega.errors import BadFrame
from bottega.sampled_log import SampledLog
from bottega.transport.channel.backend import Backend
from bottega.transport.handshake.binding import distrust_reason
from bottega.transport.handshake.messages import (
    PROOF_BYTES,
    REQUEST_BYTES,
    HandshakeRequest,
    Verdict,
    challenge,
    parse_request,
    refusal,
)

# Enough for a fleet of workers that all lost one server and reconnect at once, which is no attack.
MAX_PENDING_CONNECTIONS = 128
HANDSHAKE_S = 2.0
# Pause when this process has no file descriptors left, so that it does not spin.
_FULL_PAUSE_S = 0.05

_log = logging.getLogger(__name__)


class Authenticator(Protocol):
    """Decides about pending connections. All calls come from the acceptor's thread."""

    def token_for(self, request: HandshakeRequest) -> bytes | Verdict:
        """Return the token that the peer has to prove, or the verdict that refuses the request."""
        ...

    def admit(self, request: HandshakeRequest, connection: socket.socket) -> bool:
        """Store a connection whose proof was right. Return False if the offer has been used meanwhile."""
        ...


class Acceptor:
    """The listening sockets for links, and the thread that serves them.

    Args:
        group: See links_group.
    """

    def __init__(
        self,
        authenticator: Authenticator,
        sockets: Sequence[tuple[Backend, socket.socket]],
        *,
        group: int | None = None,
    ) -> None:
        self._authenticator = authenticator
        self._sockets = sockets
        self._group = group
        self._refused = SampledLog(
            _log,
            "a connection for a link was refused",
            more="more connections for links were refused",
            counted="connections",
        )
        self._not_taken = SampledLog(
            _log,
            "a connection for a link cannot be accepted",
            more="more connections for links could not be accepted",
            counted="connections",
            level=logging.WARNING,
        )
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, _PendingConnection] = {}
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._open = True
        self._thread = threading.Thread(target=self._serve, name="links", daemon=True)

    def start(self) -> None:
        """Start to accept connections."""
        for backend, listening in self._sockets:
            listening.setblocking(False)
            self._selector.register(listening, selectors.EVENT_READ, backend)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._thread.start()

    def stop(self) -> None:
        """Stop accepting connections, and wait until the thread has ended."""
        self._open = False
        self._wake_writer.send(b"\0")
        self._thread.join()
        for pending in list(self._pending.values()):
            self._forget(pending).close()
        for closing in (self._wake_reader, self._wake_writer, *(listening for _, listening in self._sockets)):
            closing.close()
        self._selector.close()
        self._refused.sum_up()
        self._not_taken.sum_up()

    def _serve(self) -> None:
        while self._open:
            for key, _ in self._selector.select(self._timeout_s()):
                self._handle(key)
            self._expire()

    def _handle(self, key: selectors.SelectorKey) -> None:
        if isinstance(key.data, Backend):
            assert isinstance(key.fileobj, socket.socket)
            self._accept(key.data, key.fileobj)
        elif isinstance(key.data, _PendingConnection) and key.data.connection in self._pending:
            self._advance(key.data)

    def _accept(self, backend: Backend, listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
        except BlockingIOError:
            return  # the process that connected has left again
        except OSError as error:
            self._not_taken.log_event({"why": error.strerror or "unknown"})
            time.sleep(_FULL_PAUSE_S)
            return
        # The folder and the mode of the socket should keep other users out. This check holds if they do not.
        if backend == Backend.MEMFD and (why := distrust_reason(connection, self._group)):
            self._refused.log_event({"backend": backend}, {"why": why})
            connection.close()
            return
        connection.setblocking(False)
        if len(self._pending) >= MAX_PENDING_CONNECTIONS:
            self._forget(next(iter(self._pending.values()))).close()
        pending = self._pending[connection] = _PendingConnection(self._authenticator, backend, connection)
        self._selector.register(connection, selectors.EVENT_READ, pending)

    def _advance(self, pending: _PendingConnection) -> None:
        try:
            proven = pending.read()
        except (BadFrame, OSError) as error:
            self._refused.log_event({"backend": pending.backend}, {"why": str(error)})
            self._forget(pending).close()
            return
        if proven is not None:
            connection = self._forget(pending)
            if not self._authenticator.admit(proven, connection):
                with suppress(OSError):
                    connection.send(bytes([Verdict.REFUSED]))
                connection.close()

    def _expire(self) -> None:
        now = time.monotonic()
        for pending in [pending for pending in self._pending.values() if pending.until <= now]:
            self._forget(pending).close()

    def _forget(self, pending: _PendingConnection) -> socket.socket:
        del self._pending[pending.connection]
        self._selector.unregister(pending.connection)
        return pending.connection

    def _timeout_s(self) -> float | None:
        if not self._pending:
            return None
        return max(min(pending.until for pending in self._pending.values()) - time.monotonic(), 0.0)


class _PendingConnection:
    """A connection whose peer is not proven yet. Its request is read first, then its proof, and nothing more."""

    def __init__(self, authenticator: Authenticator, backend: Backend, connection: socket.socket) -> None:
        self.connection = connection
        self.until = time.monotonic() + HANDSHAKE_S
        self._authenticator = authenticator
        self.backend = backend
        self._bytes = b""
        self._request: HandshakeRequest | None = None
        self._wanted = b""
        self._next: Callable[[bytes], HandshakeRequest | None] = self._on_request
        self._length = REQUEST_BYTES

    def read(self) -> HandshakeRequest | None:
        """Read the bytes that have arrived. Return the request once it is complete and proven, else None.

        Raises BadFrame or OSError if the connection must be dropped.
        """
        got = self.connection.recv(self._length - len(self._bytes))
        if not got:
            raise BadFrame("it closed the connection in the middle of the handshake")
        self._bytes += got
        if len(self._bytes) < self._length:
            return None
        whole, self._bytes = self._bytes, b""
        return self._next(whole)

    def _on_request(self, encoded: bytes) -> None:
        request = parse_request(encoded)
        if request.backend != self.backend and not _carries(self.backend, request.backend):
            raise BadFrame("its request is for another backend")
        token = self._authenticator.token_for(request)
        if isinstance(token, Verdict):
            self.connection.send(refusal(token))
            raise BadFrame(f"its offer is refused ({token.name.lower()})")
        answer, self._wanted = challenge(token, encoded)
        self.connection.send(answer)
        self._request, self._next, self._length = replace(request, answer=answer), self._on_proof, PROOF_BYTES

    def _on_proof(self, proof: bytes) -> HandshakeRequest | None:
        if not hmac.compare_digest(proof, self._wanted):
            self.connection.send(bytes([Verdict.REFUSED]))
            raise BadFrame("its proof is wrong")
        return self._request


def _carries(listening: Backend, backend: Backend) -> bool:
    """Return whether connections for one backend may arrive at the listening socket of another."""
    return backend.of_devices and (listening is Backend.MEMFD or backend.over_network)
