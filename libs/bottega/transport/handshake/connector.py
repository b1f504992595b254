"""The connecting side of links: tries an offer's ways, quickest first, and says which it took, and why.

A way counts only when it was really gone: the connection stands and both ends have proved themselves.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

from bottega.errors import AuthFailed, ConfigError, DeadlineExceeded, LinkError, PeerDead, StaleEpoch
from bottega.process import open_files
from bottega.transport.backends.memfd import MemfdReceiver, MemfdSender
from bottega.transport.backends.tcp import TcpReceiver, TcpSender, tune
from bottega.transport.channel.backend import Backend, BackendChoice
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.channel.deadline import Deadline
from bottega.transport.channel.limits import Limits
from bottega.transport.handshake.credentials import distrust_reason, links_group
from bottega.transport.handshake.identity import host_identity
from bottega.transport.handshake.messages import (
    CHALLENGE_BYTES,
    WELCOME_BYTES,
    Direction,
    answer_challenge,
    check_verdict,
    client_hello,
)
from bottega.transport.handshake.offer import Offer
from bottega.transport.link import LEASE_S, Link, LinkTerms
from bottega.transport.memory.mappings import sharing_failure

_BACKENDS = (Backend.MEMFD, Backend.TCP)
# A listener's host answers in microseconds, another one in a round trip: more is trouble, and another backend may do.
_ATTEMPT_S = 5.0


def connect(
    offer: Offer,
    deadline: Deadline,
    *,
    limits: Limits | None = None,
    counters: LinkCounters | None = None,
    lease_s: float = LEASE_S,
    backends: tuple[Backend, ...] = _BACKENDS,
) -> Link:
    """Takes up an offer: on one host by shared memory, else by TCP; Link.backend_choice says it.

    limits: what this end takes in. backends: those that may be tried, in order.
    Raises StaleEpoch, AuthFailed, or PeerDead naming what became of each backend; DeadlineExceeded.
    """
    attempt = _ConnectionAttempt(offer, limits or Limits(), counters or LinkCounters(), lease_s)
    failed: list[str] = []
    refused = False
    for backend in backends:
        try:
            return attempt.open(backend, deadline.sooner(_ATTEMPT_S), failed)
        except StaleEpoch:
            raise
        except LinkError as error:
            failed.append(f"{backend}: {error.message}")
            refused = refused or isinstance(error, AuthFailed)
        if deadline.left_s() == 0:
            raise DeadlineExceeded(f"no link in time: {'; '.join(failed)}")
    kind = AuthFailed if refused else PeerDead
    raise kind(f"no backend reaches the listener: {'; '.join(failed)}")


class _ConnectionAttempt:
    """One offer that is being taken up."""

    def __init__(self, offer: Offer, limits: Limits, counters: LinkCounters, lease_s: float) -> None:
        self._offer = offer
        self._limits = limits
        self._counters = counters
        self._lease_s = lease_s

    def open(self, backend: Backend, deadline: Deadline, failed: list[str]) -> Link:
        """The link by this backend. Raises LinkError."""
        opened_by: dict[Backend, Callable[[Deadline, list[str]], Link]] = {
            Backend.MEMFD: self._by_memfd,
            Backend.TCP: self._by_tcp,
        }
        return opened_by[backend](deadline, failed)

    def _by_memfd(self, deadline: Deadline, failed: list[str]) -> Link:
        endpoint = self._offer.memfd
        if endpoint is None:
            raise PeerDead("the listener offers none")
        if not endpoint.host or endpoint.host != host_identity():
            raise PeerDead("the listener is on another host")
        if why := sharing_failure():
            raise PeerDead(why)
        sending, receiving = self._connections(Backend.MEMFD, lambda: _unix(endpoint.path, deadline), deadline)
        terms = self._terms(Backend.MEMFD, "both ends are on one host", failed)
        return Link(terms, MemfdSender(sending), MemfdReceiver(receiving, self._limits))

    def _by_tcp(self, deadline: Deadline, failed: list[str]) -> Link:
        endpoint = self._offer.tcp
        if endpoint is None:
            raise PeerDead("the listener offers none")
        address = (endpoint.host, endpoint.port)
        sending, receiving = self._connections(Backend.TCP, lambda: _tcp(address, deadline), deadline)
        return Link(self._terms(Backend.TCP, "the address answers", failed), TcpSender(sending), TcpReceiver(receiving))

    def _connections(
        self, backend: Backend, dial: Callable[[], socket.socket], deadline: Deadline
    ) -> tuple[socket.socket, socket.socket]:
        """Two proven connections: one to send on, one to receive on."""
        made: list[socket.socket] = []
        try:
            for direction in Direction:
                made.append(dial())
                self._introduce(made[-1], backend, direction, deadline)
        except OSError as error:
            _close(made)
            raise _unreachable(error) from error
        except LinkError:
            _close(made)
            raise
        return made[0], made[1]

    def _introduce(self, connection: socket.socket, backend: Backend, direction: Direction, deadline: Deadline) -> None:
        greeting = client_hello(self._offer, backend, direction, self._limits)
        _limit(connection, deadline)
        connection.sendall(greeting)
        proof = answer_challenge(self._offer.token, greeting, _read(connection, CHALLENGE_BYTES, deadline))
        connection.sendall(proof)
        check_verdict(_read(connection, WELCOME_BYTES, deadline)[0])

    def _terms(self, backend: Backend, reason: str, failed: list[str]) -> LinkTerms:
        return LinkTerms(
            link_id=self._offer.link_id,
            epoch=self._offer.epoch,
            backend_choice=BackendChoice(backend=backend, reason="; ".join([*failed, f"{backend}: {reason}"])),
            ours=self._limits,
            theirs=self._offer.limits,
            counters=self._counters,
            lease_s=self._lease_s,
        )


def _unix(path: str, deadline: Deadline) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _limit(connection, deadline)
        connection.connect(path)
        # Whoever may write in its folder could have put another socket there.
        if why := distrust_reason(connection, _group()):
            raise AuthFailed(f"what listens there is not to be trusted: {why}")
    except BaseException:
        connection.close()
        raise
    return connection


def _group() -> int | None:
    try:
        return links_group()
    except ConfigError as error:
        raise AuthFailed(error.message) from None


def _tcp(address: tuple[str, int], deadline: Deadline) -> socket.socket:
    connection = socket.create_connection(address, timeout=_seconds(deadline))
    with suppress(OSError):  # a peer that left at once has a better story
        tune(connection)
    return connection


def _read(connection: socket.socket, count: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < count:
        _limit(connection, deadline)
        got = connection.recv(count - len(data))
        if not got:
            raise AuthFailed("the listener hung up in the middle of the greeting")
        data += got
    return data


def _limit(connection: socket.socket, deadline: Deadline) -> None:
    connection.settimeout(_seconds(deadline))


def _seconds(deadline: Deadline) -> float:
    # 0 would mean not to wait at all, with another error.
    return max(deadline.left_s(), 1e-3)


def _unreachable(error: OSError) -> LinkError:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("nobody answered in time")
    why = open_files.too_many(error).message if open_files.is_cause(error) else error.strerror or error
    return PeerDead(f"cannot be reached: {why}")


def _close(connections: list[socket.socket]) -> None:
    for connection in connections:
        connection.close()
