"""ControlNets in the engine's own process: what a worker falls back on, and all there is without a server.

Knows sessions and rows; knows no servers.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from bottega.diffusion.controlnets.cache import ControlNetCache, ControlNetLease
from bottega.diffusion.controlnets.group import ControlRow, run_group, write_residuals
from bottega.diffusion.controlnets.network import ControlNet
from bottega.diffusion.controlnets.provider import ControlInput, ControlRecord
from bottega.diffusion.controlnets.session import ControlSession
from bottega.diffusion.rows import Row


@dataclass(slots=True, kw_only=True, eq=False)
class _LocalSession:
    """One control of a request: the handle. place: of its ControlNet in the request's loan."""

    control: ControlInput
    hold: ControlNetLease
    place: int
    session: ControlSession | None = None
    waited_s: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether its ControlNet can never be here."""
        return self.hold.values.done() and self.hold.values.exception() is not None


class LocalControlNets:
    """Runs the ControlNets of a shelf in the thread that asks. A ControlNets, see there.

    fixed_rows: pads every forward to so many rows, for images that are equal byte for byte whatever runs beside
    them; 0 is off.
    """

    def __init__(self, shelf: ControlNetCache, *, fixed_rows: int = 0) -> None:
        self._shelf = shelf
        self._fixed_rows = fixed_rows
        self._rows: list[Row] = []
        self._answers: dict[tuple[Row, Hashable], list[Tensor]] = {}

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        """See ControlNets."""
        hold = self._shelf.borrow([control.name for control in controls])
        return tuple(_LocalSession(control=control, hold=hold, place=place) for place, control in enumerate(controls))

    def opened(self, handles: Sequence[Hashable]) -> bool:
        """See ControlNets."""
        return all(self._session(_seat(handle)) is not None for handle in handles)

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        """See ControlNets."""
        wait(_pending(handles), timeout_s, FIRST_COMPLETED)

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        """See ControlNets."""
        seats = [_seat(handle) for handle in handles]
        for seat in seats:
            self._shelf.give_back(seat.hold)
            seat.session = None
        self._rows, self._answers = [], {}  # else they would keep a ControlNet that the shelf lets go
        return tuple(ControlRecord(waited_s=seat.waited_s) for seat in seats)

    def ask(self, rows: list[Row]) -> None:
        """Computes what can be computed now: there is nobody else to do it meanwhile."""
        self._rows, self._answers = rows, {}
        self._compute()

    def ask_ahead(self, rows: list[Row]) -> None:
        """See ResidualProvider: nobody else would compute it meanwhile."""

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        """See ResidualProvider."""
        return all((row, handle) in self._answers for handle in row.controls)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        """See ResidualProvider; what it waits for are loads."""
        began_s = perf_counter()
        missing = [handle for row in rows for handle in row.controls if (row, handle) not in self._answers]
        if not _pending(missing):
            self.opened(missing)  # raises: none of them will ever be here
        self.settle(missing, timeout_s)
        for handle in dict.fromkeys(missing):
            _seat(handle).waited_s += perf_counter() - began_s
        self._compute()

    def spoilt(self, row: Row) -> bool:
        """See ResidualProvider: what is here is whole."""
        return False

    def take(self, row: Row, point: int) -> list[Tensor]:
        """See ResidualProvider."""
        return [self._answers[row, handle][point] for handle in row.controls]

    def _compute(self) -> None:
        """The answers that are missing and whose ControlNet is loaded, in as few forwards as possible."""
        groups: dict[Hashable, list[tuple[Row, _LocalSession, ControlSession]]] = {}
        for row in self._rows:
            for handle in row.controls:
                seat = _seat(handle)
                session = None if seat.failed else self._session(seat)
                if session is not None and (row, handle) not in self._answers:
                    key = (session.net, row.sample.shape, row.embeds.prompt.shape)
                    groups.setdefault(key, []).append((row, seat, session))
        for group in groups.values():
            self._run(group)

    def _run(self, group: Sequence[tuple[Row, _LocalSession, ControlSession]]) -> None:
        began_s = perf_counter()
        rows = [
            ControlRow(session=session, half=row.half, sample=row.sample, timestep=row.timestep)
            for row, _, session in group
        ]
        residuals = run_group(rows, fixed_rows=self._fixed_rows)
        # In place: nobody else reads them.
        slots = [[residual[index] for residual in residuals] for index in range(len(rows))]
        for _ in write_residuals(residuals, rows, slots):
            pass
        if residuals[0].device.type == "cuda":
            torch.cuda.synchronize(residuals[0].device)  # else the time would be that of the launch
        for (row, seat, _), answer in zip(group, slots, strict=True):
            self._answers[row, seat] = answer
        seconds = perf_counter() - began_s
        for seat in {seat for _, seat, _ in group}:
            seat.waited_s += seconds

    def _session(self, seat: _LocalSession) -> ControlSession | None:
        """The seat's session, begun once its ControlNet is here. Raises the BottegaError for which it never will."""
        if seat.session is None and seat.hold.values.done():
            net = seat.hold.values.result()[seat.place]
            seat.session = ControlSession(net, seat.control)
        return seat.session


def _seat(handle: Hashable) -> _LocalSession:
    assert isinstance(handle, _LocalSession), "every handle was made here"
    return handle


def _pending(handles: Sequence[Hashable]) -> set[Future[tuple[ControlNet, ...]]]:
    """The loans of these handles that still wait for a load."""
    holds = {_seat(handle).hold.values for handle in handles}
    return {nets for nets in holds if not nets.done()}
