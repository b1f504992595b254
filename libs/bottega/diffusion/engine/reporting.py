"""Progress and checkpoints of jobs: asked for between two steps, said when what they are made of has come to the host.

On a CPU that is at once. On a GPU copies leave beside the steps that follow; what is said of a job keeps its order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from bottega.diffusion.device.device import HostCopy
from bottega.diffusion.engine.checkpoint import JobCopy, write_checkpoint
from bottega.diffusion.engine.events import Event, JobAdvanced, JobCheckpointed
from bottega.diffusion.engine.job import EngineJob
from bottega.diffusion.engine.preview import LatentPreview
from bottega.diffusion.errors import not_finite
from bottega.diffusion.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Advance:
    """How far a job was. preview: the latent of image `preview_index`, where one is shown."""

    steps_done: int
    preview_index: int
    preview: HostCopy | None

    @property
    def ready(self) -> bool:
        return self.preview is None or self.preview.ready


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Snapshot:
    """What a checkpoint is made of."""

    steps_done: int
    copy: JobCopy

    @property
    def ready(self) -> bool:
        return self.copy.ready


class Reporter:
    """progress_interval_s, checkpoint_interval_s: see EngineLimits.

    Of each job it keeps what the device has not finished: no more than the steps that it is behind, which are two.
    """

    def __init__(self, model: Model, *, progress_interval_s: float, checkpoint_interval_s: float) -> None:
        self._model = model
        self._progress_interval_s = progress_interval_s
        self._checkpoint_interval_s = checkpoint_interval_s
        self._preview = LatentPreview.fit(model)
        self._reports: dict[EngineJob, deque[_Advance | _Snapshot]] = {}

    @property
    def jobs(self) -> Sequence[EngineJob]:
        """Those of which something is to be said."""
        return list(self._reports)

    def note_step(self, job: EngineJob, now_s: float) -> None:
        """The job has made a step: its progress and a checkpoint are to be said, where they are due."""
        ended = job.steps_done == job.steps_total
        if ended or now_s - job.reported_s >= self._progress_interval_s:
            job.reported_s = now_s
            shown = job.previewed()
            preview = self._model.runtime.to_host(shown.estimate) if job.order.preview else None
            self._add(job, _Advance(steps_done=job.steps_done, preview_index=shown.index, preview=preview))
        if not ended and job.checkpoint_due(now_s, self._checkpoint_interval_s):
            job.checkpoint_s, job.checkpoint_steps = now_s, job.steps_done
            copy = JobCopy(self._model.runtime, job.state())
            self._add(job, _Snapshot(steps_done=job.steps_done, copy=copy))

    def say(self, job: EngineJob, *, to_the_end: bool = False) -> Iterator[Event]:
        """What there is to say of a job, as far as it has come; to the end, it waits for the rest.

        Raises NotFinite where a latent is not finite. The job may be forgotten meanwhile.
        """
        while reports := self._reports.get(job):
            if not (to_the_end or reports[0].ready):
                return
            report = reports.popleft()
            yield self._advanced(job, report) if isinstance(report, _Advance) else self._checkpoint(job, report)
        self.forget(job)

    def forget(self, job: EngineJob) -> None:
        """Nothing more is said of it. Harmless where nothing was to be."""
        self._reports.pop(job, None)

    def _add(self, job: EngineJob, report: _Advance | _Snapshot) -> None:
        self._reports.setdefault(job, deque()).append(report)

    def _advanced(self, job: EngineJob, said: _Advance) -> JobAdvanced:
        preview = None if said.preview is None else self._preview.draw(said.preview.take())
        return JobAdvanced(
            key=job.key,
            steps_done=said.steps_done,
            device_s=job.device_s,
            preview_index=said.preview_index,
            preview=preview,
        )

    def _checkpoint(self, job: EngineJob, snapshot: _Snapshot) -> JobCheckpointed:
        saved = snapshot.copy.take()
        if not all(bool(torch.isfinite(image.latent).all()) for image in saved.images):
            raise not_finite(job.order.spec.loras, job.order.spec.controlnets)
        data = write_checkpoint(self._model, job.order.spec, saved)
        return JobCheckpointed(key=job.key, steps_done=snapshot.steps_done, data=data)
