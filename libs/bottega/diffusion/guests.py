"""What this engine computes for the other worker of its pair: rows of jobs that are not its own.

It keeps their conditions and sessions with their ControlNets; latents, samplers and steps are the other's. All calls
come from the engine's thread. Knows no links.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.controls import ControlNets
from bottega.diffusion.denoiser import Prediction
from bottega.diffusion.follower import Guest
from bottega.diffusion.row import Embeds, Half, Row
from bottega.errors import BottegaError, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestRow:
    """One row of a step. controls: places of its guest's ControlNets that are active in it."""

    guest: int
    image: int
    half: Half
    step: int
    controls: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Computed:
    """What became of a step's rows.

    places: of those that were not late for their residuals. noise: [places, channels, height, width], in that order.
    waited_s: for residuals.
    """

    places: tuple[int, ...]
    noise: Tensor
    waited_s: float


@dataclass(slots=True, kw_only=True, eq=False)
class _Seat:
    """A guest that is here. handles: of its sessions. opened: whether rows with controls can be computed."""

    guest: Guest
    handles: tuple[Hashable, ...] = ()
    opened: bool = False


class Guests:
    """predict: a forward of this engine. controlnets: where sessions are opened; none where there are none."""

    def __init__(
        self,
        predict: Callable[[Sequence[Row]], Prediction],
        *,
        device: torch.device,
        dtype: torch.dtype,
        controlnets: ControlNets | None,
    ) -> None:
        self._predict = predict
        self._device = device
        self._dtype = dtype
        self._controlnets = controlnets
        self._seats: dict[int, _Seat] = {}

    @property
    def count(self) -> int:
        """How many are here."""
        return len(self._seats)

    @property
    def opening(self) -> bool:
        """Whether `settled` has something to look at."""
        return any(not seat.opened for seat in self._seats.values())

    def admit(self, number: int, guest: Guest) -> None:
        """Takes a job in. Raises BottegaError where its ControlNets can never be opened here."""
        handles: tuple[Hashable, ...] = ()
        if guest.controls:
            if self._controlnets is None:
                raise Unavailable("this worker has no ControlNets")
            handles = self._controlnets.open(guest.controls)
        halves = {half: self._here(embeds) for half, embeds in guest.halves.items()}
        seat = _Seat(guest=Guest(halves=halves), handles=handles, opened=not handles)
        self._seats[number] = seat

    def settled(self) -> list[tuple[int, BottegaError | None]]:
        """Jobs whose ControlNets have been opened since the last call, or never will be, with the reason."""
        news: list[tuple[int, BottegaError | None]] = []
        for number, seat in list(self._seats.items()):
            if seat.opened or self._controlnets is None:
                continue
            try:
                seat.opened = self._controlnets.opened(seat.handles)
            except BottegaError as error:
                self.dismiss(number)
                news.append((number, error))
                continue
            if seat.opened:
                news.append((number, None))
        return news

    def dismiss(self, number: int) -> None:
        """Forgets a job. Harmless when it is not here."""
        seat = self._seats.pop(number, None)
        if seat is not None and seat.handles and self._controlnets is not None:
            self._controlnets.close(seat.handles)

    def clear(self) -> None:
        """Forgets all."""
        for number in list(self._seats):
            self.dismiss(number)

    def compute(self, rows: Sequence[GuestRow], samples: Tensor, timesteps: Tensor) -> Computed | None:
        """One forward. samples: [rows, channels, height, width]; timesteps: [rows].

        Returns None where all rows were late for their residuals. Raises ValueError for a row of a job that is not
        here, and as Denoiser.predict does.
        """
        samples = samples.to(self._device, self._dtype)
        made = [self._row(row, samples[place], timesteps[place]) for place, row in enumerate(rows)]
        prediction = self._predict(made)
        noise = {place: prediction.noise[row] for place, row in enumerate(made) if row in prediction.noise}
        if not noise:
            return None
        return Computed(places=tuple(noise), noise=torch.stack(list(noise.values())), waited_s=prediction.waited_s)

    def _row(self, row: GuestRow, sample: Tensor, timestep: Tensor) -> Row:
        seat = self._seats.get(row.guest)
        known = seat is not None and row.half in seat.guest.halves
        if seat is None or not known or max(row.controls, default=-1) >= len(seat.handles):
            raise ValueError(f"a row is of job {row.guest}, which is not here as it says")
        return Row(
            # Rows of one image belong together, and no other engine's do.
            owner=(id(self), row.guest, row.image),
            step=row.step,
            half=row.half,
            sample=sample,
            timestep=timestep,
            embeds=seat.guest.halves[row.half],
            controls=tuple(seat.handles[place] for place in row.controls),
        )

    def _here(self, embeds: Embeds) -> Embeds:
        return Embeds(
            prompt=embeds.prompt.to(self._device),
            pooled=embeds.pooled.to(self._device),
            time_ids=embeds.time_ids.to(self._device),
        )
