"""The connecting side of links: it tries the backends of an offer, fastest first, and reports its choice.

A backend is chosen only after both ends have proved themselves on its connections. A backend of devices must also have
moved bytes in both directions.
"""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import suppress

from bottega.errors import AuthFailed, ConfigError, DeadlineExceeded, LinkError, PeerDead, StaleEpoch
from bottega.process import open_files
from bottega.transport.backends import Proven, backend_ends
from bottega.transport.backends.frame_stream import tune
from bottega.transport.backends.records import SealKeys
from bottega.transport.channel.backend import Backend, BackendChoice, Deadline, DeviceLinks, Limits, ProvenConnections
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.handshake.binding import distrust_reason, links_group
from bottega.transport.handshake.messages import (
    CHALLENGE_BYTES,
    WELCOME_BYTES,
    Direction,
    Offer,
    answer_challenge,
    check_verdict,
    handshake_request,
    host_identity,
    seal_keys,
)
from bottega.transport.link import LEASE_S, Link, LinkTerms, open_device_link
from bottega.transport.memory import sharing_failure

# Seconds for a connection: microseconds within a host, a round trip between hosts. Then the next backend is tried.
_ATTEMPT_S = 5.0

_Dial = Callable[[Deadline], socket.socket]


def connect(
    offer: Offer,
    deadline: Deadline,
    *,
    limits: Limits | None = None,
    counters: LinkCounters | None = None,
    lease_s: float = LEASE_S,
    backends: tuple[Backend, ...] | None = None,
    devices: DeviceLinks | None = None,
) -> Link:
    """Open the link of an offer: between devices if both ends support one, else by shared memory, else by TCP.

    Link.backend_choice tells which backend was chosen, and why.

    Args:
        limits: Limits on the messages that this process receives.
        backends: The backends to try, in order; None for all.
        devices: The device of this process; None for host memory only.

    Raises:
        StaleEpoch: There is a newer offer for the link.
        AuthFailed: The listener refused the offer, or two devices could not be linked, which uses the offer up. A new
            offer tries other backends.
        PeerDead: No backend reached the listener; the message has the reason for each.
        DeadlineExceeded: The link was not open in time.
    """
    limits = limits or Limits()
    reasons: list[str] = []
    refused = False
    for backend in backends or tuple(each for each in Backend if devices is not None or not each.of_devices):
        try:
            dial = _dial_device(offer, backend, devices) if backend.of_devices else _DIALS[backend](offer)
            if offer.sealed and backend.of_devices and not _on_this_host(offer):
                raise PeerDead("the listener requires encryption between hosts, and device links cannot encrypt")
            sealed = offer.sealed and backend == Backend.TCP
            sending, receiving = _connections(dial, offer, backend, limits, deadline.sooner(_ATTEMPT_S), sealed=sealed)
        except StaleEpoch:
            raise
        except LinkError as error:
            reasons.append(f"{backend}: {error.message}")
            refused = refused or isinstance(error, AuthFailed)
        else:
            reasons.append(f"{backend}: {_CHOSEN[backend]}")
            terms = LinkTerms(
                link_id=offer.link_id,
                epoch=offer.epoch,
                backend_choice=BackendChoice(backend=backend, reason="; ".join(reasons)),
                ours=limits,
                theirs=offer.limits,
                counters=counters or LinkCounters(),
                lease_s=lease_s,
            )
            if not backend.of_devices:
                return Link(terms, *backend_ends(backend, sending, receiving, limits))
            assert devices is not None, "they were asked"
            return _device_link(
                terms,
                devices,
                ProvenConnections(
                    sending=sending.connection, receiving=receiving.connection, connecting=True, limits=limits
                ),
                offer,
            )
        if deadline.left_s() == 0:
            raise DeadlineExceeded(f"no link in time: {'; '.join(reasons)}")
    kind = AuthFailed if refused else PeerDead
    raise kind(f"no backend reaches the listener: {'; '.join(reasons)}")


def _device_link(terms: LinkTerms, devices: DeviceLinks, connections: ProvenConnections, offer: Offer) -> Link:
    assert offer.device is not None, "it was requested"
    backend = terms.backend_choice.backend
    try:
        return open_device_link(terms, devices, connections)
    except LinkError as error:
        devices.remember_failure(backend, offer.device, error.message)
        raise AuthFailed(
            f"the two devices could not be linked by {backend}, and the offer is used up (a new offer will "
            f"try other backends): {error.message}"
        ) from error


def _connections(
    dial: _Dial, offer: Offer, backend: Backend, limits: Limits, deadline: Deadline, *, sealed: bool
) -> tuple[Proven, Proven]:
    """Open two connections and prove this process on them: one to send, one to receive. Raises LinkError."""
    made: list[socket.socket] = []
    keys: list[SealKeys | None] = []
    try:
        for direction in Direction:
            made.append(dial(deadline))
            request = handshake_request(offer, backend, direction, limits, sealed=sealed)
            answer = _prove(made[-1], request, offer.token, deadline)
            keys.append(seal_keys(offer.token, request, answer, connecting=True) if sealed else None)
    except (OSError, LinkError) as error:
        for connection in made:
            connection.close()
        if isinstance(error, LinkError):
            raise
        raise _unreachable(error) from error
    sending, receiving = (Proven(connection=connection, keys=its) for connection, its in zip(made, keys, strict=True))
    return sending, receiving


def _prove(connection: socket.socket, request: bytes, token: bytes, deadline: Deadline) -> bytes:
    """Return the listener's answer, once both ends have proved themselves."""
    connection.settimeout(_seconds(deadline))
    connection.sendall(request)
    answer = _read(connection, CHALLENGE_BYTES, deadline)
    connection.sendall(answer_challenge(token, request, answer))
    check_verdict(_read(connection, WELCOME_BYTES, deadline)[0])
    return answer


def _on_this_host(offer: Offer) -> bool:
    return offer.memfd is not None and bool(offer.memfd.host) and offer.memfd.host == host_identity()


def _memfd_dial(offer: Offer) -> _Dial:
    endpoint = offer.memfd
    if endpoint is None:
        raise PeerDead("the listener offers none")
    if not endpoint.host or endpoint.host != host_identity():
        raise PeerDead("the listener is on another host")
    if why := sharing_failure():
        raise PeerDead(why)
    return functools.partial(_unix, endpoint.path)


def _tcp_dial(offer: Offer) -> _Dial:
    endpoint = offer.tcp
    if endpoint is None:
        raise PeerDead("the listener offers none")
    return functools.partial(_tcp, (endpoint.host, endpoint.port))


def _dial_device(offer: Offer, backend: Backend, devices: DeviceLinks | None) -> _Dial:
    """Return the function that connects for a device backend, by unix socket within a host. Raises PeerDead."""
    if devices is None:
        raise PeerDead("this process has no GPU whose memory it could link")
    if offer.device is None:
        raise PeerDead("the listener has no device, or is configured without device links")
    if why := devices.misfit(backend, offer.device):
        raise PeerDead(why)
    endpoint = offer.memfd
    if endpoint is not None and endpoint.host and endpoint.host == host_identity():
        return functools.partial(_unix, endpoint.path)
    if not backend.over_network:
        raise PeerDead("the listener is on another host")
    return _tcp_dial(offer)


# How to reach the listener of each backend; raises PeerDead if it cannot be reached.
_DIALS: dict[Backend, Callable[[Offer], _Dial]] = {Backend.MEMFD: _memfd_dial, Backend.TCP: _tcp_dial}
_CHOSEN = {
    Backend.CUDA_IPC: "both ends have a device of one host",
    Backend.NCCL: "both ends have a device of their own",
    Backend.GLOO: "both ends are told to",
    Backend.MEMFD: "both ends are on one host",
    Backend.TCP: "the address answers",
}


def _unix(path: str, deadline: Deadline) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_seconds(deadline))
        connection.connect(path)
        # Any process that may write in the folder could have put another socket there.
        if why := distrust_reason(connection, _group()):
            raise AuthFailed(f"the listener is not trusted: {why}")
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
    with suppress(OSError):  # a peer that left at once is reported by the next call
        tune(connection)
    return connection


def _read(connection: socket.socket, count: int, deadline: Deadline) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(_seconds(deadline))
        got = connection.recv(count - len(data))
        if not got:
            raise AuthFailed("the listener closed the connection in the middle of the handshake")
        data += got
    return data


def _seconds(deadline: Deadline) -> float:
    # 0 would mean non-blocking mode, which raises another error.
    return max(deadline.left_s(), 1e-3)


def _unreachable(error: OSError) -> LinkError:
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("nobody answered in time")
    why = open_files.too_many(error).message if open_files.is_cause(error) else error.strerror or error
    return PeerDead(f"cannot be reached: {why}")
