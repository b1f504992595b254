"""What this engine computes for the other worker of its pair: rows of jobs that are not its own.

It keeps their conditions, sessions with their ControlNets, and LoRAs; latents, samplers and steps are the other's. All
calls come from the engine's thread. Knows no links.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.controlnets.provider import ControlNets
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.loras import LoraSource, LoraWeights
from bottega.diffusion.loras.addon import JobLoras, ask_for_loras
from bottega.diffusion.parallel.offload import RemoteJob
from bottega.diffusion.rows import Embeds, Half, Row
from bottega.errors import BottegaError, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRow:
    """One row of a step. controls: places of its guest's ControlNets that are active in it. loras: whether its
    LoRAs are."""

    guest: int
    image: int
    half: Half
    step: int
    controls: tuple[int, ...] = ()
    loras: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteLoras:
    """Who brings guests' LoRAs, how long each may take, and what they go into."""

    source: LoraSource | None
    weights: LoraWeights
    timeout_s: float
    clock: Callable[[], float]

    def ask(self, guest: RemoteJob) -> JobLoras:
        """Raises Unavailable where nobody brings any."""
        return ask_for_loras(
            self.source, guest.loras, guest.lora_stores, now_s=self.clock(), timeout_s=self.timeout_s, step=0
        )

    def here(self, loras: JobLoras) -> bool:
        """Whether they are here. Raises the BottegaError for which they never will be."""
        loras.arrive(self.weights, (), self.clock())
        return not loras.pending


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedRows:
    """What became of a step's rows.

    places: of those that were not late for their residuals. noise: [places, channels, height, width], in that order.
    waited_s: for residuals.
    """

    places: tuple[int, ...]
    noise: Tensor
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteJobStatus:
    """Whether a job's rows can be computed, when that has changed. error: why they never will be; it is forgotten."""

    guest: int
    ready: bool
    error: BottegaError | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _AdmittedJob:
    """A guest that is here. handles: of its sessions. opened: whether all its rows can be computed, as was told."""

    guest: RemoteJob
    loras: JobLoras
    handles: tuple[Hashable, ...] = ()
    opened: bool = False


class RemoteJobs:
    """predict: a forward of this engine. controlnets: where sessions are opened; none where there are none. loras: who
    brings theirs.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Row]], Prediction],
        *,
        device: torch.device,
        dtype: torch.dtype,
        controlnets: ControlNets | None,
        loras: RemoteLoras,
    ) -> None:
        self._predict = predict
        self._device = device
        self._dtype = dtype
        self._controlnets = controlnets
        self._loras = loras
        self._seats: dict[int, _AdmittedJob] = {}

    @property
    def count(self) -> int:
        """How many are here."""
        return len(self._seats)

    @property
    def opening(self) -> bool:
        """Whether `settled` has something to look at."""
        return any(not seat.opened for seat in self._seats.values())

    def admit(self, number: int, guest: RemoteJob) -> None:
        """Takes a job in. Raises BottegaError where its ControlNets or LoRAs can never be here."""
        handles: tuple[Hashable, ...] = ()
        if guest.controls:
            if self._controlnets is None:
                raise Unavailable("this worker has no ControlNets")
            handles = self._controlnets.open(guest.controls)
        halves = {half: self._here(embeds) for half, embeds in guest.halves.items()}
        try:
            loras = self._loras.ask(guest)
        except BottegaError:
            self._close(handles)
            raise
        opened = not handles and not loras.pending
        self._seats[number] = _AdmittedJob(guest=RemoteJob(halves=halves), loras=loras, handles=handles, opened=opened)

    def settled(self) -> list[RemoteJobStatus]:
        """What has changed since the last call: ControlNets and LoRAs have come, or never will, or a ControlNet's
        server was lost, and whoever goes on with it has to begin first.
        """
        news: list[RemoteJobStatus] = []
        for number, seat in list(self._seats.items()):
            before = seat.opened
            try:
                seat.opened = (before or self._loras.here(seat.loras)) and self._sessions_open(seat)
            except BottegaError as error:
                self.dismiss(number)
                news.append(RemoteJobStatus(guest=number, ready=False, error=error))
                continue
            if seat.opened != before:
                news.append(RemoteJobStatus(guest=number, ready=seat.opened))
        return news

    def dismiss(self, number: int) -> None:
        """Forgets a job. Harmless when it is not here."""
        seat = self._seats.pop(number, None)
        if seat is not None:
            self._close(seat.handles)
            seat.loras.close()

    def clear(self) -> None:
        """Forgets all."""
        for number in list(self._seats):
            self.dismiss(number)

    def compute(self, rows: Sequence[RemoteRow], samples: Tensor, timesteps: Tensor) -> ComputedRows | None:
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
        return ComputedRows(places=tuple(noise), noise=torch.stack(list(noise.values())), waited_s=prediction.waited_s)

    def _row(self, row: RemoteRow, sample: Tensor, timestep: Tensor) -> Row:
        seat = self._seats.get(row.guest)
        known = seat is not None and row.half in seat.guest.halves
        lacks = seat is not None and row.loras and seat.loras.loras is None
        if seat is None or not known or lacks or max(row.controls, default=-1) >= len(seat.handles):
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
            loras=seat.loras.loras if row.loras else None,
        )

    def _sessions_open(self, seat: _AdmittedJob) -> bool:
        return self._controlnets is None or not seat.handles or self._controlnets.opened(seat.handles)

    def _close(self, handles: tuple[Hashable, ...]) -> None:
        if handles and self._controlnets is not None:
            self._controlnets.close(handles)

    def _here(self, embeds: Embeds) -> Embeds:
        return Embeds(
            prompt=embeds.prompt.to(self._device),
            pooled=embeds.pooled.to(self._device),
            time_ids=embeds.time_ids.to(self._device),
        )
