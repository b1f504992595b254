"""The listening side of links: it makes offers, and opens a link for each process that connects with one.

It binds only the configured address and path. Its caller sends the offers over gRPC. A caller with many unused offers
does not block others: at its limit, its oldest offer is dropped for its next one.
"""

from __future__ import annotations

import random
import secrets
import socket
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from bottega.errors import (
    AuthFailed,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    LinkClosed,
    LinksFull,
    StaleEpoch,
    Violation,
)
from bottega.transport.backends import Proven, backend_ends
from bottega.transport.backends.frame_stream import tune
from bottega.transport.channel.backend import Backend, BackendChoice, Deadline, DeviceLinks, Limits, ProvenConnections
from bottega.transport.channel.counters import LinkCounters
from bottega.transport.handshake.acceptor import Acceptor
from bottega.transport.handshake.binding import Endpoints, bind_tcp, bind_unix, links_group
from bottega.transport.handshake.messages import (
    TOKEN_BYTES,
    Direction,
    HandshakeRequest,
    MemfdEndpoint,
    Offer,
    TcpEndpoint,
    Verdict,
    host_identity,
    is_link_id,
    new_link_id,
    seal_keys,
)
from bottega.transport.link import LEASE_S, Link, LinkTerms, open_device_link
from bottega.transport.memory import sharing_failure

MAX_OFFERS = 256
# Upper bound for one caller: all workers of one host may reconnect at once, and some offers are left for another host.
MAX_OFFERS_OF_ONE = 128
# An offer is not dropped for others before this. A worker uses it within milliseconds, or within this on a busy
# machine.
SAFE_S = 1.0
# Offers become old enough to be dropped within SAFE_S. The spread keeps refused callers from returning together.
_RETRY_S = (0.3, 1.0)
# How many links have their newest epoch remembered. Offers of forgotten links are refused.
_MAX_REMEMBERED = 4096


class LinkListener:
    """Makes offers of links and accepts the links. Any thread may call it. Open links outlive it."""

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        limits: Limits | None = None,
        counters: LinkCounters | None = None,
        token_s: float = 30.0,
        lease_s: float = LEASE_S,
        devices: DeviceLinks | None = None,
    ) -> None:
        """Bind the endpoints and start to accept connections.

        Args:
            token_s: Seconds for which an offer can be used (PendingOffers).
            devices: The device of this process, for links between devices; None for host memory only.

        Raises ConfigError if an address cannot be bound, or other users control the folder of the unix socket.
        """
        self._endpoints = endpoints
        self._limits = limits or Limits()
        self._counters = counters
        self._lease_s = lease_s
        self._devices = devices
        self._lock = threading.RLock()
        self._pending = PendingOffers(self._lock, token_s=token_s)
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._links: weakref.WeakValueDictionary[str, Link] = weakref.WeakValueDictionary()
        self._closed = False
        self._memfd: MemfdEndpoint | None = None
        self._tcp: TcpEndpoint | None = None
        self._acceptor = Acceptor(self, self._bind(), group=links_group() if endpoints.unix_path else None)
        self._acceptor.start()

    def __enter__(self) -> LinkListener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def offer(self, link_id: str | None = None, *, caller: str = "") -> Offer:
        """Return an offer for one other process, which can be used once.

        With the link_id of an earlier offer, it has the next epoch, and the earlier link ends with StaleEpoch.

        Args:
            caller: Host of the process that requests the offer. The unused offers of a host are bounded.

        Raises LinksFull if too many offers wait, and InvalidRequest if link_id is malformed.
        """
        link_id = link_id or new_link_id()
        if not is_link_id(link_id):
            violation = Violation(field="link_id", description=f"{link_id!r} is not the ID of a link")
            raise InvalidRequest(f"link_id: {violation.description}", violations=[violation])
        with self._lock:
            if self._closed:
                raise LinkClosed("this process opens no more links")
            self._pending.drop(link_id)
            self._pending.make_room(caller)
            epoch = self._epochs.pop(link_id, 0) + 1
            self._epochs[link_id] = epoch
            while len(self._epochs) > _MAX_REMEMBERED:
                self._epochs.popitem(last=False)
            offer = self._new_offer(link_id, epoch)
            self._pending.add(offer, caller)
            older = self._links.pop(link_id, None)
        if older is not None:
            older.end(StaleEpoch("the link was opened again; this connection is of an older epoch"))
        return offer

    def accept(self, offer: Offer, deadline: Deadline) -> Link:
        """Wait until the other process has connected with the offer, and return the link.

        Raises DeadlineExceeded, after which waiting again is possible; AuthFailed if the offer expired or was dropped
        in favour of others; StaleEpoch if there is a newer one; or the error of opening a link between devices.
        """
        request, pending = self._taken_up(offer, deadline)
        link = self._link(pending, request)
        with self._lock:
            stale = offer.epoch < self._epochs.get(offer.link_id, 0)
            if not stale:
                self._links[offer.link_id] = link
        if stale:
            link.close()
            raise StaleEpoch("there is a newer offer for this link")
        return link

    def _taken_up(self, offer: Offer, deadline: Deadline) -> tuple[HandshakeRequest, PendingOffer]:
        """Wait for the connections of both directions."""
        with self._lock:
            while True:
                pending = self._pending_offer(offer)
                if len(pending.connections) == len(Direction) and pending.request is not None:
                    return pending.request, self._pending.pop(offer.link_id)
                left_s = min(deadline.left_s(), max(pending.until - time.monotonic(), 0.0))
                if not pending.changed.wait(left_s) and deadline.left_s() == 0:
                    raise DeadlineExceeded("the offer of a link was not used in time")

    def close(self) -> None:
        """Stop opening links. Open links stay open."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._pending.clear()
        self._acceptor.stop()
        if self._memfd is not None:
            Path(self._memfd.path).unlink(missing_ok=True)

    def token_for(self, request: HandshakeRequest) -> bytes | Verdict:
        """Return the token that the peer has to prove, or the verdict that refuses the request."""
        with self._lock:
            if request.epoch < self._epochs.get(request.link_id, 0):
                return Verdict.STALE
            pending = self._pending.get(request.link_id)
            if pending is None or pending.offer.epoch != request.epoch or request.direction in pending.connections:
                return Verdict.REFUSED
            if pending.request is not None and request.backend != pending.request.backend:
                return Verdict.REFUSED
            if request.backend.of_devices and not self._has(request.backend):
                return Verdict.REFUSED
            if request.sealed is not (self._endpoints.seal and request.backend == Backend.TCP):
                return Verdict.REFUSED
            return pending.offer.token

    def admit(self, request: HandshakeRequest, connection: socket.socket) -> bool:
        """Store a connection whose proof was right. Return False if the offer has been used meanwhile."""
        with self._lock:
            pending = self._pending.get(request.link_id)
            if pending is None or isinstance(self.token_for(request), Verdict) or self._closed:
                return False
            try:
                if connection.family != socket.AF_UNIX:
                    tune(connection)
                connection.send(bytes([Verdict.WELCOME]))
            except OSError:
                return False
            keys = None
            if request.sealed:
                keys = seal_keys(pending.offer.token, request.encoded, request.answer, connecting=False)
            pending.connections[request.direction] = Proven(connection=connection, keys=keys)
            pending.request = request
            pending.changed.notify_all()
            return True

    def _pending_offer(self, offer: Offer) -> PendingOffer:
        if self._closed:
            raise LinkClosed("this process opens no more links")
        if offer.epoch < self._epochs.get(offer.link_id, 0):
            raise StaleEpoch("there is a newer offer for this link")
        pending = self._pending.get(offer.link_id)
        if pending is None:
            raise AuthFailed(
                f"the offer of a link was not used within {self._pending.token_s:g} s, or was dropped for others"
            )
        return pending

    def _link(self, pending: PendingOffer, request: HandshakeRequest) -> Link:
        terms = LinkTerms(
            link_id=pending.offer.link_id,
            epoch=pending.offer.epoch,
            backend_choice=BackendChoice(backend=request.backend, reason=f"the other end came by {request.backend}"),
            ours=self._limits,
            theirs=request.limits,
            counters=self._counters or LinkCounters(),
            lease_s=self._lease_s,
        )
        sending = pending.connections[Direction.LISTENER_SENDS]
        receiving = pending.connections[Direction.CONNECTOR_SENDS]
        if not request.backend.of_devices:
            return Link(terms, *backend_ends(request.backend, sending, receiving, self._limits))
        assert self._devices is not None, "other backends are refused"
        connections = ProvenConnections(
            sending=sending.connection, receiving=receiving.connection, connecting=False, limits=self._limits
        )
        return open_device_link(terms, self._devices, connections)

    def _has(self, backend: Backend) -> bool:
        return self._devices is not None and backend in self._devices.endpoint.backends

    def _new_offer(self, link_id: str, epoch: int) -> Offer:
        return Offer(
            link_id=link_id,
            token=secrets.token_bytes(TOKEN_BYTES),
            epoch=epoch,
            limits=self._limits,
            sealed=self._endpoints.seal,
            memfd=self._memfd,
            tcp=self._tcp,
            device=self._devices.endpoint if self._devices is not None else None,
        )

    def _bind(self) -> list[tuple[Backend, socket.socket]]:
        sockets: list[tuple[Backend, socket.socket]] = []
        try:
            if self._endpoints.unix_path is not None and not sharing_failure():
                sockets.append((Backend.MEMFD, bind_unix(self._endpoints.unix_path)))
                self._memfd = MemfdEndpoint(path=str(self._endpoints.unix_path), host=host_identity())
            if self._endpoints.tcp is not None:
                sockets.append((Backend.TCP, bind_tcp(*self._endpoints.tcp)))
                self._tcp = TcpEndpoint(host=self._endpoints.tcp[0], port=sockets[-1][1].getsockname()[1])
        except ConfigError:
            for _, bound in sockets:
                bound.close()
            raise
        return sockets


@dataclass(slots=True, kw_only=True, eq=False)
class PendingOffer:
    """An offer that has not been used yet."""

    offer: Offer
    caller: str
    made: float
    until: float
    changed: threading.Condition
    """Notified when this offer changes. Each offer has its own, so that a crowd of offers wakes no other thread."""
    connections: dict[Direction, Proven] = field(default_factory=dict)
    """Proven connections by direction."""
    request: HandshakeRequest | None = None


class PendingOffers:
    """Unused offers by link_id, oldest first.

    Args:
        lock: The listener's lock.
        token_s: Seconds for which an offer can be used.
    """

    def __init__(self, lock: threading.RLock, *, token_s: float) -> None:
        self.token_s = token_s
        self._lock = lock
        self._pending: dict[str, PendingOffer] = {}

    def get(self, link_id: str) -> PendingOffer | None:
        """Return an offer that can still be used, or None."""
        self._expire()
        return self._pending.get(link_id)

    def add(self, offer: Offer, caller: str) -> None:
        """Add an offer. Call `make_room` first."""
        now = time.monotonic()
        self._pending[offer.link_id] = PendingOffer(
            offer=offer,
            caller=caller,
            made=now,
            until=now + self.token_s,
            changed=threading.Condition(self._lock),
        )

    def make_room(self, caller: str) -> None:
        """If there are too many offers, drop one, so that this caller can get another.

        At the caller's limit, its oldest offer is dropped. At the total limit, the oldest offer of the caller with the
        most offers is dropped. Raises LinksFull if that one is too young.
        """
        self._expire()
        counts = Counter(each.caller for each in self._pending.values())
        if counts[caller] >= MAX_OFFERS_OF_ONE:
            self._give_up_oldest(caller)
        elif len(self._pending) >= MAX_OFFERS:
            self._give_up_oldest(_most_of(counts))

    def pop(self, link_id: str) -> PendingOffer:
        """Remove an offer that is being used. Raises KeyError."""
        return self._pending.pop(link_id)

    def drop(self, link_id: str) -> None:
        """Drop an offer if there is one, close its connections, and wake the threads that wait for it."""
        pending = self._pending.pop(link_id, None)
        if pending is None:
            return
        for proven in pending.connections.values():
            proven.connection.close()
        pending.changed.notify_all()

    def clear(self) -> None:
        """Drop all offers."""
        for link_id in list(self._pending):
            self.drop(link_id)

    def _expire(self) -> None:
        now = time.monotonic()
        while (oldest := next(iter(self._pending.values()), None)) is not None and oldest.until <= now:
            self.drop(oldest.offer.link_id)

    def _give_up_oldest(self, caller: str) -> None:
        oldest = next(each for each in self._pending.values() if each.caller == caller)
        if time.monotonic() - oldest.made < SAFE_S:
            raise LinksFull(
                "too many offers of links wait to be used; request one again later, or from another service",
                metadata={"limit": "offers"},
                retry_after_s=random.uniform(*_RETRY_S),
            )
        self.drop(oldest.offer.link_id)


def _most_of(counts: Mapping[str, int]) -> str:
    return max(counts, key=lambda caller: counts[caller])
