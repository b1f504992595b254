"""The peer as this engine leads it: what is offloaded to it, over a link that is opened again whenever it is lost.

What is lost with a link is not asked for again: the engine computes it itself.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bottega import kinds
from bottega.diffusion.parallel.messages import PairMessageKind, guest_message, read_noise, step_message
from bottega.diffusion.parallel.offload import OffloadedRow, OffloadResult, RemoteJob
from bottega.diffusion.rows import Row
from bottega.errors import BottegaError
from bottega.transport import (
    Connection,
    Incoming,
    Limits,
    LinkClient,
    LinkClientHandler,
    LinkClientSettings,
    LinkCounters,
    OfferSource,
    kind_of,
    number_message,
    read_number,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLinkSettings(LinkClientSettings):
    """The peer may be away for long."""

    limits: Limits = field(default_factory=lambda: Limits(slots=4, slot_bytes=1 << 30))
    retry_s: float = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class _FollowerState:
    """One link's. guests: told of on it, by number; ready: those whose rows can be lent. step: the answer that is owed.

    busy: whether the peer has something of its own to do. outcome: of the last step, once it has come.
    """

    connection: Connection
    guests: dict[RemoteJob, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)
    busy: bool = True
    step: int = 0
    rows: Sequence[Row] = ()
    sent_s: float = 0.0
    outcome: OffloadResult | None = None


class Leader(LinkClientHandler):
    """An OffloadTarget, see there. address: host:port of the peer's worker. terms: what it must agree to."""

    def __init__(
        self,
        address: str,
        *,
        terms: Mapping[str, str],
        offers: OfferSource,
        counters: LinkCounters,
        settings: PeerLinkSettings | None = None,
    ) -> None:
        self._address = address
        self._life: _FollowerState | None = None
        self._changed = threading.Condition()  # of the life, by the two threads
        self._numbers = itertools.count(1)
        self._complaint = ""
        self._client = LinkClient(
            self,
            peer="its peer",
            request=lambda link_id: offers.request(kinds.WORKER, address, link_id, terms),
            settings=settings or PeerLinkSettings(),
            counters=counters,
        )

    def start(self) -> None:
        """Opens the link in the background, now and whenever it is lost."""
        self._client.start()

    def stop(self) -> None:
        """Closes it."""
        self._client.close()

    @property
    def wants_link(self) -> bool:
        """Always."""
        return True

    @property
    def linked(self) -> bool:
        """Whether there is a link."""
        return self._life is not None

    @property
    def name(self) -> str:
        """See OffloadTarget."""
        return self._client.service or self._address

    @property
    def free(self) -> bool:
        """See OffloadTarget."""
        life = self._life
        return life is not None and not life.busy and not life.step

    @property
    def owes(self) -> bool:
        """See OffloadTarget."""
        life = self._life
        return life is not None and life.step != 0

    def knows(self, guest: RemoteJob) -> bool:
        """See OffloadTarget."""
        life = self._life
        if life is None:
            return False
        if guest not in life.guests:
            number = life.guests[guest] = next(self._numbers)
            if not guest.controls and not guest.loras:
                life.ready.add(number)  # the link keeps order: rows come after this
            life.connection.send(guest_message(number, guest))
        return life.guests[guest] in life.ready

    def forget(self, guest: RemoteJob) -> None:
        """See OffloadTarget."""
        life = self._life
        number = life.guests.pop(guest, None) if life is not None else None
        if life is not None and number is not None:
            life.ready.discard(number)
            life.connection.send(number_message(PairMessageKind.LEAVE, number))

    def lend(self, rows: Sequence[OffloadedRow]) -> bool:
        """See OffloadTarget."""
        life = self._life
        if life is None or any(each.guest not in life.guests for each in rows):
            return False  # lost since it was asked
        with self._changed:
            life.step, life.outcome = next(self._numbers), None
            life.rows, life.sent_s = [each.row for each in rows], time.monotonic()
        return life.connection.send(step_message(life.step, rows, life.guests))

    def returned(self, timeout_s: float) -> OffloadResult | None:
        """See OffloadTarget."""
        with self._changed:
            self._changed.wait_for(lambda: not self.owes, timeout_s)
            life = self._life
            return life.outcome if life is not None else None

    def on_open(self, connection: Connection) -> None:
        """It is told of jobs anew."""
        assert connection.link is not None
        choice = connection.link.backend_choice
        _log.info("linked to the peer", extra={"peer": self.name, "backend": choice.backend, "why": choice.reason})
        self._complaint = ""
        self._life = _FollowerState(connection=connection)

    def on_end(self, cause: BottegaError) -> None:
        """Says why there is no link any more; of a peer that is away, and tried every second, once."""
        with self._changed:
            before, self._life = self._life, None
            self._changed.notify_all()
        facts = {"peer": self.name, "cause": type(cause).__name__, "text": cause.message}
        if before is not None:
            _log.warning("the peer is lost; this worker draws alone", extra=facts)
        elif cause.message != self._complaint:
            self._complaint = cause.message
            _log.warning("not linked to the peer; this worker draws alone", extra=facts)

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Of the newest link."""
        life = self._life
        assert life is not None, "it was opened"
        layout = incoming.layout
        with incoming:
            views = connection.wait_all(incoming)
            kind = PairMessageKind(kind_of(layout))
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
            case _:
                raise ValueError(f"a follower sends no {kind} message")

    def _settle(
        self, life: _FollowerState, number: int, noise: dict[int, Tensor] | None, *, waited_s: float = 0.0
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
