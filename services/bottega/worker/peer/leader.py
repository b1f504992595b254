"""The peer as this engine leads it: a link that is opened again whenever it is lost, and what is lent over it.

A thread of its own opens the link, receives, and asks a quiet peer whether it is there; the engine's thread sends. What
is lost with a link is not asked for again: the engine computes it itself.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from bottega.diffusion.parallel.messages import (
    PairMessageKind,
    guest_message,
    kind_of,
    number_message,
    read_noise,
    read_number,
    step_message,
)
from bottega.diffusion.parallel.offload import OffloadedRow, OffloadResult, RemoteJob
from bottega.diffusion.rows import Row
from bottega.errors import BottegaError, PeerDead, Unavailable
from bottega.transport import Deadline, Incoming, Keepalive, Limits, Link, LinkCounters, Offer, connect, link_boundary
from bottega.worker.peer.connection import PeerConnection

_log = logging.getLogger(__name__)

# Of offer and connection; a peer that lives takes milliseconds.
_CONNECT_S = 5.0
# How often a peer that cannot be reached is tried again.
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOffer:
    """worker: name of the peer."""

    offer: Offer
    worker: str


class PeerOffers(Protocol):
    """Who brings offers of links."""

    def ask_peer(self, address: str, link_id: str) -> Future[PeerOffer]:
        """An offer of the worker at host:port. link_id: of the lost link that it replaces, or empty.

        Its exception is a BottegaError.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """silence_s: after which a peer is taken for dead. limits: of what comes in."""

    silence_s: float = 5.0
    limits: Limits = field(default_factory=lambda: Limits(slots=4, slot_bytes=1 << 30))


@dataclass(slots=True, kw_only=True, eq=False)
class _LeaderLink:
    """One link's. guests: told of on it, by number; ready: those whose rows can be lent. step: the answer that is owed.

    busy: whether the peer has something of its own to do. outcome: of the last step, once it has come.
    """

    talk: PeerConnection
    guests: dict[RemoteJob, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    busy: bool = True
    step: int = 0
    rows: Sequence[Row] = ()
    sent_s: float = 0.0
    outcome: OffloadResult | None = None


class Leader:
    """A Follower, see there. address: host:port of the peer's worker."""

    def __init__(
        self, address: str, *, offers: PeerOffers, counters: LinkCounters, settings: PeerSettings | None = None
    ) -> None:
        self._address = address
        self._offers = offers
        self._counters = counters
        self._settings = settings or PeerSettings()
        self._name = address
        self._life: _LeaderLink | None = None
        self._changed = threading.Condition()  # of the life, by the two threads
        self._numbers = itertools.count(1)
        self._stopped = threading.Event()
        self._before = ""
        self._told = ""

    def start(self) -> None:
        """Opens the link in the background, now and whenever it is lost."""
        threading.Thread(target=self._live, name="peer", daemon=True).start()

    def stop(self) -> None:
        """Closes it."""
        self._stopped.set()
        life = self._life
        if life is not None:
            life.talk.link.end(PeerDead("the worker is stopping"))

    @property
    def linked(self) -> bool:
        """Whether there is a link."""
        return self._life is not None

    @property
    def name(self) -> str:
        """See Follower."""
        return self._name

    @property
    def free(self) -> bool:
        """See Follower."""
        life = self._life
        return life is not None and not life.busy and not life.step

    @property
    def owes(self) -> bool:
        """See Follower."""
        life = self._life
        return life is not None and life.step != 0

    def knows(self, guest: RemoteJob) -> bool:
        """See Follower."""
        life = self._life
        if life is None:
            return False
        if guest not in life.guests:
            number = life.guests[guest] = next(self._numbers)
            if not guest.controls and not guest.loras:
                life.ready.add(number)  # the link keeps order: rows come after this
            life.talk.send(guest_message(number, guest))
        return life.guests[guest] in life.ready

    def forget(self, guest: RemoteJob) -> None:
        """See Follower."""
        life = self._life
        number = life.guests.pop(guest, None) if life is not None else None
        if life is not None and number is not None:
            life.ready.discard(number)
            life.talk.send(number_message(PairMessageKind.LEAVE, number))

    def lend(self, rows: Sequence[OffloadedRow]) -> bool:
        """See Follower."""
        life = self._life
        if life is None or any(each.guest not in life.guests for each in rows):
            return False  # lost since it was asked
        with self._changed:
            life.step, life.outcome = next(self._numbers), None
            life.rows, life.sent_s = [each.row for each in rows], time.monotonic()
        return life.talk.send(step_message(life.step, rows, life.guests))

    def returned(self, timeout_s: float) -> OffloadResult | None:
        """See Follower."""
        with self._changed:
            self._changed.wait_for(lambda: not self.owes, timeout_s)
            life = self._life
            return life.outcome if life is not None else None

    def _live(self) -> None:
        while not self._stopped.is_set():
            try:
                link = self._open()
            except FutureTimeoutError:
                self._complain(Unavailable(f"made no offer within {_CONNECT_S:g} s"))
            except BottegaError as error:
                self._complain(error)
            else:
                self._serve(link)
            self._stopped.wait(_RETRY_S)

    def _open(self) -> Link:
        deadline = Deadline.after(_CONNECT_S)
        offered = self._offers.ask_peer(self._address, self._before).result(_CONNECT_S)
        link = connect(offered.offer, deadline, limits=self._settings.limits, counters=self._counters)
        self._before, self._name, self._told = link.link_id, offered.worker, ""
        facts = {"peer": self._name, "backend": link.answer.backend, "why": link.answer.reason}
        _log.info("linked to the peer", extra=facts)
        return link

    def _complain(self, error: BottegaError) -> None:
        """Says once why there is no link; a peer that is away is tried every second."""
        if error.message != self._told:
            self._told = error.message
            facts = {"peer": self._address, "reason": type(error).__name__, "text": error.message}
            _log.warning("not linked to the peer; this worker draws alone", extra=facts)

    def _serve(self, link: Link) -> None:
        with link:
            life = self._life = _LeaderLink(talk=PeerConnection(link))
            with link_boundary(link, here="the worker", peer="its peer"):
                self._receive(life)
            with self._changed:
                self._life = None
                self._changed.notify_all()
            cause = link.cause
            facts = {"peer": self._name, "cause": type(cause).__name__, "text": cause.message if cause else ""}
            _log.warning("the peer is lost; this worker draws alone", extra=facts)

    def _receive(self, life: _LeaderLink) -> None:
        vigil = Keepalive(
            life.talk.link,
            peer=f"the peer {self._name}",
            silence_s=self._settings.silence_s,
            ping=lambda: life.talk.send(number_message(PairMessageKind.PING)),
        )
        while True:
            with vigil.next() as incoming:
                vigil.wait_all(incoming)
                self._take_in(life, incoming)

    def _take_in(self, life: _LeaderLink, incoming: Incoming) -> None:
        layout = incoming.layout
        views = [incoming.view(index) for index in range(len(layout.specs))]
        kind = kind_of(layout)
        if kind is PairMessageKind.NOISE:
            answer = read_noise(layout, views)
            noise = dict(zip(answer.places, answer.noise, strict=True))
            self._settle(life, answer.number, noise, waited_s=answer.waited_s)
            return
        number = read_number(layout, views)
        match kind:
            case PairMessageKind.DECLINED:
                self._settle(life, number, None)
            case PairMessageKind.STATE:
                life.busy = number != 0
            case PairMessageKind.READY:
                life.ready.add(number)
            case PairMessageKind.REFUSED:
                life.ready.discard(number)
            case PairMessageKind.PONG:
                return
            case _:
                raise ValueError(f"a follower says no {kind}")

    def _settle(
        self, life: _LeaderLink, number: int, noise: dict[int, Tensor] | None, *, waited_s: float = 0.0
    ) -> None:
        """The answer to a step has come."""
        with self._changed:
            if number != life.step:
                raise ValueError(f"step {number} is answered, which was not asked for")
            if noise is not None:
                if any(place >= len(life.rows) for place in noise):
                    raise ValueError(f"step {number} had fewer rows than are answered")
                rows = {life.rows[place]: tensor.to(life.rows[place].sample) for place, tensor in noise.items()}
                if any(tensor.shape != row.sample.shape for row, tensor in rows.items()):
                    raise ValueError(f"step {number} had rows of another shape")
                life.outcome = OffloadResult(noise=rows, seconds=max(0.0, time.monotonic() - life.sent_s - waited_s))
            life.step, life.rows = 0, ()
            self._changed.notify_all()
