"""What this engine computes for the other worker of its pair: rows of jobs that are not its own.

It keeps their conditions, sessions with their ControlNets, and LoRAs; latents, samplers and steps are the other's. All
calls come from the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.controlnets.provider import ControlNetProvider
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.loras.addon import EngineLoras, JobLoras
from bottega.diffusion.parallel.offload import RemoteJob
from bottega.diffusion.rows import Embeds, Half, Row
from bottega.errors import BottegaError, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRow:
    """One row of a step. controls: places of its job's ControlNets that are active in it. loras: whether its
    LoRAs are."""

    remote_job: int
    image: int
    half: Half
    step: int
    controls: tuple[int, ...] = ()
    loras: bool = False


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

    remote_job: int
    ready: bool
    error: BottegaError | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _AdmittedJob:
    """A job of the peer. handles: of its sessions. opened: whether its rows can be computed, as the peer was told."""

    remote_job: RemoteJob
    loras: JobLoras | None
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
        controlnets: ControlNetProvider | None,
        loras: EngineLoras,
        clock: Callable[[], float],
    ) -> None:
        self._predict = predict
        self._device = device
        self._dtype = dtype
        self._controlnets = controlnets
        self._loras = loras
        self._clock = clock
        self._admitted: dict[int, _AdmittedJob] = {}

    @property
    def count(self) -> int:
        """How many are here."""
        return len(self._admitted)

    @property
    def opening(self) -> bool:
        """Whether `changed_statuses` has something to look at."""
        return any(not admitted.opened for admitted in self._admitted.values())

    def admit(self, number: int, remote_job: RemoteJob) -> None:
        """Takes a job in. Raises BottegaError where its ControlNets or LoRAs can never be here."""
        handles: tuple[Hashable, ...] = ()
        if remote_job.controls:
            if self._controlnets is None:
                raise Unavailable("this worker has no ControlNets")
            handles = self._controlnets.open(remote_job.controls)
        halves = {half: self._here(embeds) for half, embeds in remote_job.halves.items()}
        try:
            loras = self._loras.ask(remote_job.loras, step=0)
        except BottegaError:
            self._close(handles)
            raise
        opened = not handles and loras is None
        self._admitted[number] = _AdmittedJob(
            remote_job=RemoteJob(halves=halves), loras=loras, handles=handles, opened=opened
        )

    def changed_statuses(self) -> list[RemoteJobStatus]:
        """What has changed since the last call: ControlNets and LoRAs have come, or never will, or a ControlNet's
        server was lost, and the next one has to begin first.
        """
        news: list[RemoteJobStatus] = []
        for number, admitted in list(self._admitted.items()):
            before = admitted.opened
            try:
                admitted.opened = (before or self._loras_here(admitted)) and self._sessions_open(admitted)
            except BottegaError as error:
                self.dismiss(number)
                news.append(RemoteJobStatus(remote_job=number, ready=False, error=error))
                continue
            if admitted.opened != before:
                news.append(RemoteJobStatus(remote_job=number, ready=admitted.opened))
        return news

    def dismiss(self, number: int) -> None:
        """Forgets a job. Harmless when it is not here."""
        admitted = self._admitted.pop(number, None)
        if admitted is not None:
            self._close(admitted.handles)
            if admitted.loras is not None:
                admitted.loras.close()

    def clear(self) -> None:
        """Forgets all."""
        for number in list(self._admitted):
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
        admitted = self._admitted.get(row.remote_job)
        known = admitted is not None and row.half in admitted.remote_job.halves
        loras = admitted.loras.loras if admitted is not None and admitted.loras is not None and row.loras else None
        lacks = row.loras and loras is None
        if admitted is None or not known or lacks or max(row.controls, default=-1) >= len(admitted.handles):
            raise ValueError(f"a row is of job {row.remote_job}, which is not here, or not with all that it names")
        return Row(
            # Rows of one image belong together, and no other engine's do.
            owner=(id(self), row.remote_job, row.image),
            step=row.step,
            half=row.half,
            sample=sample,
            timestep=timestep,
            embeds=admitted.remote_job.halves[row.half],
            controls=tuple(admitted.handles[place] for place in row.controls),
            loras=loras,
        )

    def _loras_here(self, admitted: _AdmittedJob) -> bool:
        """Raises the BottegaError for which they never will be."""
        if admitted.loras is not None:
            admitted.loras.update(self._clock())
        return admitted.loras is None or not admitted.loras.waiting

    def _sessions_open(self, admitted: _AdmittedJob) -> bool:
        return self._controlnets is None or not admitted.handles or self._controlnets.opened(admitted.handles)

    def _close(self, handles: tuple[Hashable, ...]) -> None:
        if handles and self._controlnets is not None:
            self._controlnets.close(handles)

    def _here(self, embeds: Embeds) -> Embeds:
        return Embeds(
            prompt=embeds.prompt.to(self._device),
            pooled=embeds.pooled.to(self._device),
            time_ids=embeds.time_ids.to(self._device),
        )
