"""The interface by which an engine offloads rows to the other worker of a pair, and the rows computed for that worker.

The worker that offloads is the leader, the other one the follower. The follower's engine stores the conditions of the
leader's jobs and the data of their add-ons. The leader has latents, samplers and steps. Only the engine's thread makes
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bottega.device.device import Device
from bottega.engine.addon import EngineAddOn, JobAddOn
from bottega.engine.forward import Prediction
from bottega.errors import BottegaError, InvalidRequest, Unavailable
from bottega.model.rows import Embeds, Half, Row


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadedPart:
    """An add-on's data about a job for the same add-on of the follower: a JSON header, and tensors by name."""

    header: bytes
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteJob:
    """A job whose rows may be offloaded. The follower receives it once and stores it."""

    halves: Mapping[Half, Embeds]
    parts: Mapping[str, OffloadedPart] = field(default_factory=dict)
    """Data of the job's add-ons, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadedRow:
    """A row for the follower to compute."""

    row: Row
    remote_job: RemoteJob
    image: int
    """Index of the image in the job."""
    active: tuple[int, ...] = ()
    """One number for each add-on in `remote_job.parts`, see `JobAddOn.active_in`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OffloadResult:
    """The follower's result for offloaded rows."""

    noise: Mapping[Row, Tensor]
    """Predicted noise, [channels, height, width], by row; without rows whose residuals were late at the follower."""
    seconds: float
    """Seconds from sending the rows to the answer, without the time that this engine waited for residuals."""


class OffloadTarget(Protocol):
    """The engine that computes rows for this one. Only the engine's thread calls it, and no call waits long."""

    @property
    def name(self) -> str:
        """Name of its worker."""
        ...

    @property
    def free(self) -> bool:
        """Whether it can compute rows now: it is linked and idle, and no answer is pending."""
        ...

    def accepts(self, remote_job: RemoteJob) -> bool:
        """Return whether rows of this job can be offloaded. The job is sent first if it is new."""
        ...

    def forget(self, remote_job: RemoteJob) -> None:
        """Tell the follower that a job has ended, if it knows the job."""
        ...

    def offload(self, rows: Sequence[OffloadedRow]) -> bool:
        """Send rows of one batch, and return whether they were sent."""
        ...

    def result(self, timeout_s: float) -> OffloadResult | None:
        """Return the result for the last rows, or None if it does not come within the timeout."""
        ...

    @property
    def awaits_result(self) -> bool:
        """Whether the result for the last rows is still pending."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRow:
    """A row of a step, as the leader identifies it."""

    remote_job: int
    image: int
    half: Half
    step: int
    active: tuple[int, ...] = ()
    """One number for each add-on of its job, see `JobAddOn.activate`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComputedRows:
    """The result for a step: the noise of its rows."""

    places: tuple[int, ...]
    """Indexes of the rows whose residuals were not late."""
    noise: Tensor
    """Predicted noise, [places, channels, height, width], in the same order."""
    waited_s: float
    """Seconds of waiting for residuals."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RemoteJobStatus:
    """Tells the leader whether a job's rows can be computed now."""

    remote_job: int
    ready: bool
    error: BottegaError | None = None
    """Why its rows can never be computed, after which the job is removed; None if they can be, now or later."""


@dataclass(slots=True, kw_only=True, eq=False)
class _AdmittedJob:
    halves: Mapping[Half, Embeds]
    parts: list[JobAddOn]
    opened: bool
    """Whether its rows can be computed, as last reported to the leader."""

    def close(self) -> None:
        for part in self.parts:
            part.close()


class RemoteJobs:
    """The jobs of the leader whose rows this engine computes.

    `device`, `dtype` and `latent_channels` are of this engine's model; `addons` and `predict` are the engine's own.
    """

    def __init__(
        self,
        predict: Callable[[Sequence[Row]], Prediction],
        *,
        device: Device,
        dtype: torch.dtype,
        latent_channels: int,
        addons: Sequence[EngineAddOn],
        clock: Callable[[], float],
    ) -> None:
        self._predict = predict
        self._device = device
        self._dtype = dtype
        self._latent_channels = latent_channels
        self._addons = {addon.kind: addon for addon in addons}
        self._clock = clock
        self._admitted: dict[int, _AdmittedJob] = {}

    @property
    def count(self) -> int:
        """Number of jobs."""
        return len(self._admitted)

    @property
    def opening(self) -> bool:
        """Whether any job is not ready, so that `changed_statuses` must be called."""
        return any(not admitted.opened for admitted in self._admitted.values())

    def admit(self, number: int, remote_job: RemoteJob) -> None:
        """Add a job. Raise BottegaError if its add-ons can never serve it."""
        halves = {half: embeds.map(self._device.to_device) for half, embeds in remote_job.halves.items()}
        job = _AdmittedJob(halves=halves, parts=[], opened=not remote_job.parts)
        try:
            for kind, part in remote_job.parts.items():
                job.parts.append(self._open(kind, part, halves))
        except BottegaError:
            job.close()
            raise
        self._admitted[number] = job

    def changed_statuses(self) -> list[RemoteJobStatus]:
        """Return what changed since the last call: a job became ready, never will be, or must load something again."""
        news: list[RemoteJobStatus] = []
        now_s = self._clock()
        for number, admitted in list(self._admitted.items()):
            before = admitted.opened
            try:
                admitted.opened = all(part.ready(now_s) for part in admitted.parts)
            except BottegaError as error:
                self.dismiss(number)
                news.append(RemoteJobStatus(remote_job=number, ready=False, error=error))
                continue
            if admitted.opened != before:
                news.append(RemoteJobStatus(remote_job=number, ready=admitted.opened))
        return news

    def dismiss(self, number: int) -> None:
        """Remove a job. Do nothing if it is unknown."""
        admitted = self._admitted.pop(number, None)
        if admitted is not None:
            admitted.close()

    def clear(self) -> None:
        """Remove all jobs."""
        for number in list(self._admitted):
            self.dismiss(number)

    def compute(self, rows: Sequence[RemoteRow], samples: Tensor, timesteps: Tensor) -> ComputedRows | None:
        """Run one forward pass; return None if the residuals of all rows were late.

        `samples` is [rows, channels, height, width] and `timesteps` [rows]. Raise ValueError for a row of an unknown
        job, or the errors of `Denoiser.predict`.
        """
        samples = self._device.to_device(samples, self._dtype)
        made = [self._row(row, samples[place], timesteps[place]) for place, row in enumerate(rows)]
        prediction = self._predict(made)
        noise = {place: prediction.noise[row] for place, row in enumerate(made) if row in prediction.noise}
        if not noise:
            return None
        return ComputedRows(places=tuple(noise), noise=torch.stack(list(noise.values())), waited_s=prediction.waited_s)

    def _open(self, kind: str, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> JobAddOn:
        addon = self._addons.get(kind)
        if addon is None:
            raise Unavailable(f"this worker has no add-on for {kind}")
        try:
            return addon.open_remote(part, halves)
        except ValueError as error:
            raise InvalidRequest(f"the other worker's data for {kind} is malformed: {error}") from None

    def _row(self, remote: RemoteRow, sample: Tensor, timestep: Tensor) -> Row:
        admitted = self._admitted.get(remote.remote_job)
        if admitted is None or remote.half not in admitted.halves or len(remote.active) < len(admitted.parts):
            raise ValueError(f"a row does not fit job {remote.remote_job}, or the job is unknown")
        row = Row(
            # Rows of one image have the same owner, which no other engine's rows have.
            owner=(id(self), remote.remote_job, remote.image),
            step=remote.step,
            half=remote.half,
            sample=sample[: self._latent_channels],
            image=sample[self._latent_channels :] if len(sample) > self._latent_channels else None,
            timestep=timestep,
            embeds=admitted.halves[remote.half],
        )
        for part, active in zip(admitted.parts, remote.active, strict=False):
            row = part.activate(row, active)
        return row
