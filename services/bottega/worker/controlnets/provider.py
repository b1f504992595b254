"""The engine's ControlNets where they run on servers: sessions, steps and residuals, and what replaces a dead server.

A ControlNet whose server is lost goes on with the next one of its list, then in this process where the weights are at
hand; its step is asked for again. Without any the request fails: a picture is never drawn without its controls. All of
it happens in the engine's thread; links have threads of their own, and ring when something has come.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bottega.diffusion.control_messages import (
    Entry,
    Opening,
    Session,
    Step,
    open_message,
    residuals_layout,
)
from bottega.diffusion.controlnets import ControlLayout, LocalControlNets
from bottega.diffusion.controls import Control, ControlRecord, ControlServer
from bottega.diffusion.row import Row
from bottega.errors import BottegaError, ControlNetUnusable, NoControlNet, TooLarge
from bottega.transport import Counters
from bottega.worker.controlnets.news import News
from bottega.worker.controlnets.pace import Pace
from bottega.worker.controlnets.reply import Reply
from bottega.worker.controlnets.seat import Loan, Seat
from bottega.worker.controlnets.server_link import LinkSettings, Offers, ServerLink

# How often a wait says that the engine lives, and looks whether something was loaded in this process.
_LOOK_S = 0.1
# Of requests whose ControlNets nobody runs now: servers come back within some seconds.
_RETRY_AFTER_S = 3.0
# Refusals that another try, later or elsewhere, changes nothing about.
_FINAL = (ControlNetUnusable, TooLarge)


class RemoteControlNets:
    """A ControlNets, see there.

    base, dtype, device: of the model. local: those at hand in this process, with their digests by name.
    pace: decides who may go on with residuals of the step before.
    """

    def __init__(
        self,
        *,
        base: ControlLayout,
        dtype: torch.dtype,
        device: torch.device,
        offers: Offers,
        local: LocalControlNets | None = None,
        digests: Mapping[str, str] | None = None,
        settings: LinkSettings | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.counters = Counters()
        self._base = base
        self._dtype = dtype
        self._device = device
        self._offers = offers
        self._local = local
        self._digests = dict(digests or {})
        self._settings = settings or LinkSettings()
        self._pace = pace or Pace({})
        self._news = News()
        self._seen = -1
        self._alive: Callable[[], None] = lambda: None
        self._links: dict[ControlServer, ServerLink] = {}
        self._before: dict[ControlServer, str] = {}  # by server, the link that was lost
        self._loans: list[Loan] = []
        self._rows: list[Row] = []
        self._local_rows: dict[Row, Row] = {}
        self._taken: dict[Row, set[Reply]] = {}  # of this turn
        self._numbers = itertools.count(1)

    @property
    def open_links(self) -> int:
        """How many servers it is linked to."""
        return sum(link.lost is None for link in self._links.values())

    def tell_alive(self, alive: Callable[[], None]) -> None:
        """Calls `alive` often from inside a wait; it must be quick."""
        self._alive = alive

    def open(self, controls: Sequence[Control]) -> tuple[Hashable, ...]:
        """See ControlNets."""
        seats = [Seat(control=control) for control in controls]
        self._seat(seats)
        errors = [seat.error for seat in seats if seat.error is not None]
        if errors:
            self.close(seats)
            raise errors[0]
        return tuple(seats)

    def opened(self, handles: Sequence[Hashable]) -> bool:
        """See ControlNets."""
        self._attend()
        seats = [_seat(handle) for handle in handles]
        for seat in seats:
            if seat.error is not None:
                raise seat.error
        return all(self._is_open(seat) for seat in seats)

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        """See ControlNets."""
        until = time.monotonic() + timeout_s
        pending = [_seat(handle) for handle in handles if not self._is_open(_seat(handle))]
        while (left_s := until - time.monotonic()) > 0:
            seen = self._news.count
            self._attend()
            if any(seat.error is not None or self._is_open(seat) for seat in pending):
                return
            self._news.wait(seen, min(left_s, _LOOK_S))

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        """See ControlNets."""
        seats = [_seat(handle) for handle in handles]
        for loan in dict.fromkeys(seat.loan for seat in seats if seat.loan is not None):
            loan.link.close(loan.number)
            self._loans.remove(loan)
        for seat in seats:
            self._leave(seat)
        self._rows = [row for row in self._rows if not set(row.controls) & set(seats)]
        return tuple(seat.record for seat in seats)

    def ask(self, rows: list[Row]) -> None:
        """See ResidualProvider."""
        self._pace.asked()
        self._rows, self._local_rows, self._taken = rows, {}, {}
        for link in self._links.values():
            link.spare_slots()
        self._attend()
        self._send()
        self._compute()

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        """See ResidualProvider."""
        self._pace.needed()
        self._attend()
        return self._ready(row, points)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        """See ResidualProvider. Raises why nobody runs a ControlNet of theirs any more, where that is so for all."""
        began = time.monotonic()
        missing = {seat for row in rows for seat in _seats(row) if not self._has(seat, row, points)}
        try:
            while (left_s := began + timeout_s - time.monotonic()) > 0:
                seen = self._news.count
                self._attend()
                self._send()
                self._compute()
                if any(self._ready(row, points) for row in rows):
                    return
                self._raise_if_hopeless(rows)
                self._alive()
                self._news.wait(seen, min(left_s, _LOOK_S))
        finally:
            for seat in missing:
                seat.waited_s += time.monotonic() - began

    def spoilt(self, row: Row) -> bool:
        """See ResidualProvider."""
        self._attend()
        return any(reply.void for reply in self._taken.get(row, ()))

    def take(self, row: Row, point: int) -> list[Tensor]:
        """See ResidualProvider."""
        local: list[Tensor] = []
        if self._local is not None and row in self._local_rows:
            local = self._local.take(self._local_rows[row], point)
        here = iter(local)
        addends = []
        for seat in _seats(row):
            if seat.local is not None:
                addends.append(next(here))
                continue
            answer = seat.answer(row)
            assert answer is not None, "it was ready"
            reply, place = answer
            self._taken.setdefault(row, set()).add(reply)
            addends.append(reply.at(point, place).to(self._device, self._dtype))
        return addends

    def stop(self) -> None:
        """Closes all links."""
        for link in self._links.values():
            link.end()

    def _ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return all(self._has(seat, row, points) for seat in _seats(row))

    def _has(self, seat: Seat, row: Row, points: tuple[int, ...]) -> bool:
        if seat.local is not None:
            here = self._local_rows.get(row)
            return self._local is not None and here is not None and self._local.ready(here, points)
        answer = seat.answer(row)
        return answer is not None and answer[0].has(points)

    def _raise_if_hopeless(self, rows: Sequence[Row]) -> None:
        errors = [next((seat.error for seat in _seats(row) if seat.error is not None), None) for row in rows]
        if errors and None not in errors:
            assert errors[0] is not None
            raise errors[0]

    def _is_open(self, seat: Seat) -> bool:
        """Raises nothing: a seat that failed in this process moves on to its error."""
        if seat.local is not None and self._local is not None:
            try:
                return self._local.opened([seat.local])
            except BottegaError as error:
                self._leave(seat)
                seat.error = error
                return False
        return seat.loan is not None and seat.loan.opened

    def _attend(self) -> None:
        """Takes in what the links' threads have said."""
        if self._news.count == self._seen:
            return
        self._seen = self._news.count
        for loan in list(self._loans):
            link = loan.link
            if link.lost is not None:
                self._move(loan, link.lost)
            elif (refusal := link.refused.pop(loan.number, None)) is not None:
                self._move(loan, refusal)
            elif not loan.opened and loan.number in link.opened:
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

    def _move(self, loan: Loan, why: BottegaError) -> None:
        """A server does not serve a loan any more: its ControlNets go on elsewhere."""
        self._loans.remove(loan)
        for seat in loan.seats:
            self._leave(seat)
        self._seat(loan.seats, why)

    def _leave(self, seat: Seat) -> None:
        seat.loan = None
        seat.forget_answers()
        if seat.local is not None and self._local is not None:
            self._local.close([seat.local])
            seat.local = None

    def _seat(self, seats: Sequence[Seat], why: BottegaError | None = None) -> None:
        """Begins sessions with the best servers that were not tried, else here. why: what the last ones failed of."""
        by_server: dict[ControlServer, list[Seat]] = {}
        for seat in seats:
            server = seat.next_server
            if server is not None:
                seat.tried.append(server.name)
                by_server.setdefault(server, []).append(seat)
            else:
                self._seat_here(seat, why)
        for server, together in by_server.items():
            self._borrow(self._linked(server), together)

    def _seat_here(self, seat: Seat, why: BottegaError | None) -> None:
        control = seat.control
        digest = self._digests.get(control.name)
        if self._local is None or digest is None or control.hosts.digest not in {"", digest}:
            seat.error = why if isinstance(why, _FINAL) else _nobody(seat, why)
            return
        try:
            (seat.local,) = self._local.open([control])
            seat.ran.append("")
        except BottegaError as error:
            seat.error = error

    def _linked(self, server: ControlServer) -> ServerLink:
        link = self._links.get(server)
        if link is None or link.lost is not None:
            link = self._links[server] = ServerLink(
                server, offers=self._offers, news=self._news, settings=self._settings, counters=self.counters
            )
            link.start(self._before.pop(server, ""))
        return link

    def _borrow(self, link: ServerLink, seats: list[Seat]) -> None:
        loan = Loan(number=next(self._numbers), link=link, seats=tuple(seats))
        sessions = []
        for seat in seats:
            seat.loan, seat.number = loan, next(self._numbers)
            control = seat.control
            sessions.append(
                Session(
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
        link.open(loan.number, open_message(opening))

    def _send(self) -> None:
        """Asks for what the rows of this turn need and was not asked for; a message a server, and group."""
        wanted: dict[ServerLink, list[tuple[Row, Seat]]] = {}
        for row in self._rows:
            for seat in _seats(row):
                if seat.loan is not None and seat.loan.opened and not seat.asked(row):
                    wanted.setdefault(seat.loan.link, []).append((row, seat))
        for link, pairs in wanted.items():
            shape = pairs[0][0].sample.shape
            shapes = tuple(self._base.shapes(shape[1], shape[2]))
            row_bytes = sum(math.prod(point) for point in shapes) * self._dtype.itemsize
            most = max(1, link.slot_bytes // (row_bytes + 64 * len(shapes)) - 1)
            for start in range(0, len(pairs), most):
                self._ask_for(link, pairs[start : start + most], shapes)

    def _ask_for(
        self, link: ServerLink, pairs: Sequence[tuple[Row, Seat]], shapes: tuple[tuple[int, int, int], ...]
    ) -> None:
        samples = {id(row.sample): row for row, _ in pairs}  # both halves of a request have one
        places = {key: place for place, key in enumerate(samples)}
        reply = Reply(residuals_layout(len(pairs), shapes, self._dtype), len(shapes))
        for place, (row, seat) in enumerate(pairs):
            seat.pipelined = seat.pipelined or self._pace.pipelined(seat.control, link.answer_s)
            seat.expect(row, reply, place)
        step = Step(
            number=link.number(),
            entries=tuple(
                Entry(session=seat.number, half=row.half, sample=places[id(row.sample)]) for row, seat in pairs
            ),
            samples=torch.stack([row.sample for row in samples.values()]),
            timesteps=torch.stack([row.timestep.float() for row in samples.values()]),
        )
        link.ask(step, reply)

    def _compute(self) -> None:
        """Has this process compute what only it can."""
        if self._local is None:
            return
        rows = {}
        for row in self._rows:
            here = [seat for seat in _seats(row) if seat.local is not None]
            if here and all(self._is_open(seat) for seat in here):
                rows[row] = replace(row, controls=tuple(seat.local for seat in here))
        if {row: here.controls for row, here in rows.items()} != {
            row: here.controls for row, here in self._local_rows.items()
        }:
            self._local_rows = rows
            self._local.ask(list(rows.values()))


def _seats(row: Row) -> list[Seat]:
    return [_seat(handle) for handle in row.controls]


def _seat(handle: Hashable) -> Seat:
    assert isinstance(handle, Seat), "every handle was made here"
    return handle


def _nobody(seat: Seat, why: BottegaError | None) -> NoControlNet:
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
