"""What this engine computes for the other worker of its pair: rows of jobs that are not its own.

It keeps their conditions, and what their add-ons need; latents, samplers and steps are the other's. All calls come from
the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.device.device import Device
from bottega.diffusion.engine.addon import EngineAddOn, RemoteAddOn
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.parallel.offload import OffloadedPart, RemoteJob
from bottega.diffusion.rows import Embeds, Half, Row
from bottega.errors import BottegaError, InvalidRequest, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRow:
    """One row of a step. active: of each part of its job, see RemoteAddOn.activate."""

    remote_job: int
    image: int
    half: Half
    step: int
    active: tuple[int, ...] = ()


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
    """A job of the peer. opened: whether its rows can be computed, as the peer was told."""

    halves: Mapping[Half, Embeds]
    parts: list[RemoteAddOn]
    opened: bool

    def close(self) -> None:
        for part in self.parts:
            part.close()


class RemoteJobs:
    """predict: a forward of this engine. device, dtype: of its model. addons: of this engine."""

    def __init__(
        self,
        predict: Callable[[Sequence[Row]], Prediction],
        *,
        device: Device,
        dtype: torch.dtype,
        addons: Sequence[EngineAddOn],
        clock: Callable[[], float],
    ) -> None:
        self._predict = predict
        self._device = device
        self._dtype = dtype
        self._addons = {addon.kind: addon for addon in addons}
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
        """Takes a job in. Raises BottegaError where what its add-ons need can never be here."""
        halves = {half: self._here(embeds) for half, embeds in remote_job.halves.items()}
        job = _AdmittedJob(halves=halves, parts=[], opened=not remote_job.parts)
        try:
            for kind, part in remote_job.parts.items():
                job.parts.append(self._open(kind, part, halves))
        except BottegaError:
            job.close()
            raise
        self._admitted[number] = job

    def changed_statuses(self) -> list[RemoteJobStatus]:
        """What has changed since the last call: what add-ons need has come, or never will, or was lost and has to come
        again.
        """
        news: list[RemoteJobStatus] = []
        for number, admitted in list(self._admitted.items()):
            before = admitted.opened
            try:
                admitted.opened = all(part.ready(self._clock()) for part in admitted.parts)
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
            admitted.close()

    def clear(self) -> None:
        """Forgets all."""
        for number in list(self._admitted):
            self.dismiss(number)

    def compute(self, rows: Sequence[RemoteRow], samples: Tensor, timesteps: Tensor) -> ComputedRows | None:
        """One forward. samples: [rows, channels, height, width]; timesteps: [rows].

        Returns None where all rows were late for their residuals. Raises ValueError for a row of a job that is not
        here, and as Denoiser.predict does.
        """
        samples = self._device.to_device(samples, self._dtype)
        made = [self._row(row, samples[place], timesteps[place]) for place, row in enumerate(rows)]
        prediction = self._predict(made)
        noise = {place: prediction.noise[row] for place, row in enumerate(made) if row in prediction.noise}
        if not noise:
            return None
        return ComputedRows(places=tuple(noise), noise=torch.stack(list(noise.values())), waited_s=prediction.waited_s)

    def _open(self, kind: str, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> RemoteAddOn:
        addon = self._addons.get(kind)
        if addon is None:
            raise Unavailable(f"this worker has no {kind}")
        try:
            return addon.open_remote(part, halves)
        except ValueError as error:
            raise InvalidRequest(f"what the peer says of {kind} breaks a rule: {error}") from None

    def _row(self, said: RemoteRow, sample: Tensor, timestep: Tensor) -> Row:
        admitted = self._admitted.get(said.remote_job)
        if admitted is None or said.half not in admitted.halves or len(said.active) < len(admitted.parts):
            raise ValueError(f"a row is of job {said.remote_job}, which is not here as it says")
        row = Row(
            # Rows of one image belong together, and no other engine's do.
            owner=(id(self), said.remote_job, said.image),
            step=said.step,
            half=said.half,
            sample=sample,
            timestep=timestep,
            embeds=admitted.halves[said.half],
        )
        for part, active in zip(admitted.parts, said.active, strict=False):
            row = part.activate(row, active)
        return row

    def _here(self, embeds: Embeds) -> Embeds:
        return Embeds(
            prompt=self._device.to_device(embeds.prompt),
            pooled=self._device.to_device(embeds.pooled),
            time_ids=self._device.to_device(embeds.time_ids),
        )
