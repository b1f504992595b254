"""Who runs the ControlNets of requests: sessions begun with servers, moved when one is lost, or held in this process.

A ControlNet whose server is lost goes on with the next one of its list, then here where the weights are at hand;
without any it has an error. Belongs to the engine's thread. Knows no rows and no residuals.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from bottega.diffusion.controlnets import ControlLayout, LocalControlNets
from bottega.diffusion.controlnets.messages import Opening, SessionSpec, open_message
from bottega.diffusion.controlnets.provider import ControlInput, ControlServer
from bottega.errors import BottegaError, ControlNetUnusable, NoControlNet, TooLarge
from bottega.transport import LinkCounters, OfferSource
from bottega.worker.controlnets.condition import ChangeCondition
from bottega.worker.controlnets.server_link import ControlLinkSettings, ServerLink
from bottega.worker.controlnets.session import PlacedSession, SessionLease

# Of requests whose ControlNets nobody runs now: servers come back within some seconds.
_RETRY_AFTER_S = 3.0
# Refusals that another try, later or elsewhere, changes nothing about.
_FINAL = (ControlNetUnusable, TooLarge)


class SessionManager:
    """base, dtype: of the model. local: those at hand in this process, with their digests by name."""

    def __init__(
        self,
        *,
        base: ControlLayout,
        dtype: torch.dtype,
        offers: OfferSource,
        local: LocalControlNets | None,
        digests: Mapping[str, str],
        settings: ControlLinkSettings,
    ) -> None:
        self.counters = LinkCounters()
        self.news = ChangeCondition()
        self._base = base
        self._dtype = dtype
        self._offers = offers
        self._local = local
        self._digests = dict(digests)
        self._settings = settings
        self._seen = -1
        self._links: dict[ControlServer, ServerLink] = {}
        self._before: dict[ControlServer, str] = {}  # by server, the link that was lost
        self._loans: list[SessionLease] = []
        self._numbers = itertools.count(1)

    @property
    def links(self) -> list[ServerLink]:
        """To all servers that are used, or were."""
        return list(self._links.values())

    def place(self, seats: Sequence[PlacedSession], why: BottegaError | None = None) -> None:
        """Begins one request's sessions with the best servers that were not tried, else here.

        why: what the last ones failed of.
        """
        by_server: dict[ControlServer, list[PlacedSession]] = {}
        here: list[PlacedSession] = []
        for seat in seats:
            server = seat.next_server
            if server is not None:
                seat.tried.append(server.name)
                by_server.setdefault(server, []).append(seat)
            elif self._at_hand(seat.control):
                here.append(seat)
            else:
                seat.error = why if isinstance(why, _FINAL) else _nobody(seat, why)
        for server, together in by_server.items():
            self._borrow(self._linked(server), together)
        if here:
            self._place_here(here)

    def vacate(self, seats: Sequence[PlacedSession]) -> None:
        """They are not needed any more."""
        for loan in dict.fromkeys(seat.loan for seat in seats if seat.loan is not None):
            loan.link.close(loan.number)
            self._loans.remove(loan)
        for seat in seats:
            self._leave(seat)

    def is_open(self, seat: PlacedSession) -> bool:
        """Raises nothing: a seat that failed in this process moves on to its error."""
        if seat.local is not None and self._local is not None:
            try:
                return self._local.opened([seat.local])
            except BottegaError as error:
                self._leave(seat)
                seat.error = error
                return False
        return seat.loan is not None and seat.loan.opened

    def attend(self) -> None:
        """Takes in what the links' threads have said."""
        if self.news.count == self._seen:
            return
        self._seen = self.news.count
        for loan in list(self._loans):
            link = loan.link
            if link.lost is not None:
                self._move(loan, link.lost)
            elif loan.answer.refusal is not None:
                self._move(loan, loan.answer.refusal)
            elif not loan.opened and loan.answer.opened:
                loan.opened = True
                for seat in loan.seats:
                    seat.ran.append(link.server.name)
            elif any(seat.refused for seat in loan.seats):
                link.close(loan.number)
                self._move(loan, NoControlNet(f"ControlNet server {link.server.name} could not compute a step"))
        for server, link in list(self._links.items()):
            if link.lost is not None:
                del self._links[server]
                self._before[server] = link.link_id

    def _move(self, loan: SessionLease, why: BottegaError) -> None:
        """A server does not serve a loan any more: its ControlNets go on elsewhere."""
        self._loans.remove(loan)
        for seat in loan.seats:
            seat.give_up_answers()
            self._leave(seat)
        self.place(loan.seats, why)

    def _leave(self, seat: PlacedSession) -> None:
        seat.loan = None
        seat.forget_answers()
        if seat.local is not None and self._local is not None:
            self._local.close([seat.local])
            seat.local = None

    def _at_hand(self, control: ControlInput) -> bool:
        digest = self._digests.get(control.name)
        return self._local is not None and digest is not None and control.hosts.digest in {"", digest}

    def _place_here(self, seats: Sequence[PlacedSession]) -> None:
        """Borrows them together: one by one, a request could hold what it waits for room for."""
        assert self._local is not None, "they are at hand"
        try:
            handles = self._local.open([seat.control for seat in seats])
        except BottegaError as error:
            for seat in seats:
                seat.error = error
            return
        for seat, handle in zip(seats, handles, strict=True):
            seat.local = handle
            seat.ran.append("")

    def _linked(self, server: ControlServer) -> ServerLink:
        link = self._links.get(server)
        if link is None or link.lost is not None:
            link = self._links[server] = ServerLink(
                server,
                offers=self._offers,
                news=self.news,
                settings=self._settings,
                counters=self.counters,
                link_id=self._before.pop(server, ""),
            )
            link.start()
        return link

    def _borrow(self, link: ServerLink, seats: list[PlacedSession]) -> None:
        loan = SessionLease(number=next(self._numbers), link=link, seats=tuple(seats))
        sessions = []
        for seat in seats:
            seat.loan, seat.number = loan, next(self._numbers)
            control = seat.control
            sessions.append(
                SessionSpec(
                    number=seat.number,
                    name=control.name,
                    digest=control.hosts.digest,
                    height=control.height,
                    width=control.width,
                    scale=control.scale,
                    guess_mode=control.guess_mode,
                    halves=tuple(control.halves),
                )
            )
        opening = Opening(
            loan=loan.number,
            base=self._base,
            dtype=self._dtype,
            sessions=tuple(sessions),
            controls=tuple(seat.control for seat in seats),
        )
        self._loans.append(loan)
        loan.answer = link.open(loan.number, open_message(opening))


def _nobody(seat: PlacedSession, why: BottegaError | None) -> NoControlNet:
    name = seat.control.name
    tried = ",".join(seat.tried)
    last = f" (the last of {tried}: {why.message})" if why is not None else ""
    return NoControlNet(
        f"no server runs ControlNet {name} any more{last}, and this worker does not have it"
        if tried
        else f"no server hosts ControlNet {name}, and this worker does not have it",
        metadata={"controlnets": name, "servers": tried},
        retry_after_s=_RETRY_AFTER_S,
    )
