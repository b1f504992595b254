"""The results that leave an engine: progress, previews, checkpoints, and decoded images.

Previews and checkpoints are copied from the device between two steps, and reported when they arrive. On a CPU they
arrive at once. On a GPU the copies run in parallel with the next steps. Reports of a job stay in order.

Finished latents are decoded layer by layer in a stream of their own, in parallel with the steps of other images. On a
GPU all layers are enqueued at once. On a CPU decoding may pause between two layers, and the pixels exist when the last
one has been enqueued.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from bottega.device.device import HostCopy, PausableWork, Span
from bottega.engine.checkpoint import JobCopy, write_checkpoint
from bottega.engine.encode import encode_image, to_latent
from bottega.engine.errors import not_finite, vae_not_finite
from bottega.engine.events import Event, JobAdvanced, JobCheckpointed
from bottega.engine.job import EngineJob
from bottega.engine.request import Request
from bottega.model.model import Model
from bottega.model.vae import DecodedAs, decode_in_pieces

_log = logging.getLogger(__name__)

# Pixels of all colour fields together: a dozen pictures of a small model, or three of SDXL, whose encoder is slow on a
# CPU. The map has five numbers for each colour, so that more pixels would not change it.
_PIXELS = 12 * 64 * 64
_MIN_PICTURES, _MAX_PICTURES = 3, 12
_MAX_SIDE = 128
# Patches of one colour on each side: coarse enough to be smooth for the VAE, fine enough to vary inside a picture.
_PATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Advance:
    """A progress report that is not sent yet."""

    steps_done: int
    preview_index: int
    preview: HostCopy | None
    """Latent of image `preview_index`; None without a preview."""

    @property
    def ready(self) -> bool:
        return self.preview is None or self.preview.ready


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Snapshot:
    """A checkpoint that is not sent yet."""

    steps_done: int
    copy: JobCopy

    @property
    def ready(self) -> bool:
        return self.copy.ready


class Reporter:
    """Reports the progress and the checkpoints of jobs.

    For each job it has the reports that the device has not finished, of at most two steps.

    Args:
        progress_interval_s: See `EngineLimits`.
        checkpoint_interval_s: See `EngineLimits`.
    """

    def __init__(self, model: Model, *, progress_interval_s: float, checkpoint_interval_s: float) -> None:
        self._model = model
        self._progress_interval_s = progress_interval_s
        self._checkpoint_interval_s = checkpoint_interval_s
        self._preview = LatentPreview.fit(model)
        self._reports: dict[EngineJob, deque[_Advance | _Snapshot]] = {}

    @property
    def jobs(self) -> Sequence[EngineJob]:
        """Jobs with pending reports."""
        return list(self._reports)

    def note_step(self, job: EngineJob, now_s: float) -> None:
        """Begin a progress report and a checkpoint if they are due, after a step of the job."""
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
        """Yield the reports of a job that are ready. The job may be removed meanwhile.

        Args:
            job: The job.
            to_the_end: Whether to wait for the reports that are not ready.

        Raises:
            NotFinite: A latent has NaN or infinity.
        """
        while reports := self._reports.get(job):
            if not (to_the_end or reports[0].ready):
                return
            report = reports.popleft()
            yield self._advanced(job, report) if isinstance(report, _Advance) else self._checkpoint(job, report)
        self.forget(job)

    def forget(self, job: EngineJob) -> None:
        """Drop the pending reports of a job, if there are any."""
        self._reports.pop(job, None)

    def _add(self, job: EngineJob, report: _Advance | _Snapshot) -> None:
        self._reports.setdefault(job, deque()).append(report)

    def _advanced(self, job: EngineJob, advance: _Advance) -> JobAdvanced:
        preview = None if advance.preview is None else self._preview.draw(advance.preview.take())
        return JobAdvanced(
            key=job.key,
            steps_done=advance.steps_done,
            device_s=job.device_s,
            preview_index=advance.preview_index,
            preview=preview,
        )

    def _checkpoint(self, job: EngineJob, snapshot: _Snapshot) -> JobCheckpointed:
        saved = snapshot.copy.take()
        if not all(bool(torch.isfinite(image.latent).all()) for image in saved.images):
            raise not_finite(job.order.spec.loras, job.order.spec.controlnets)
        data = write_checkpoint(self._model, job.order.spec, saved)
        return JobCheckpointed(key=job.key, steps_done=snapshot.steps_done, data=data)


class LatentPreview:
    """A linear map from one model's latents to RGB, for small previews.

    Args:
        weights: [channels + 1, 3], to RGB in [0, 1]; the last row is the offset.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights

    @classmethod
    @torch.inference_mode()
    def fit(cls, model: Model) -> LatentPreview:
        """Fit the map by least squares to random colour fields and their latents.

        Previews are grey if the VAE encodes pictures to NaN or infinity, because text-to-image needs no encoder.
        """
        side = min(_MAX_SIDE, model.defaults.width, model.defaults.height)
        generator = torch.Generator("cpu").manual_seed(0)
        latents: list[Tensor] = []
        colours: list[Tensor] = []
        for _ in range(min(_MAX_PICTURES, max(_MIN_PICTURES, _PIXELS // side**2))):
            patches = torch.rand(1, 3, _PATCHES, _PATCHES, generator=generator)
            field = functional.interpolate(patches, size=(side, side), mode="bilinear")
            pixels = (field[0].permute(1, 2, 0) * 255).round().to(torch.uint8)
            latent = to_latent(model, encode_image(model, pixels).mean).float().cpu()
            latents.append(_columns(latent))
            colours.append(functional.interpolate(field, size=latent.shape[2:], mode="area")[0].flatten(1).T)
        inputs, wanted = torch.cat(latents), torch.cat(colours)
        if not bool(torch.isfinite(inputs).all()):
            _log.warning("the VAE encodes pictures to values that are not numbers; previews are grey")
            grey = torch.zeros(inputs.shape[1], 3)
            grey[-1] = 0.5
            return cls(grey)
        return cls(torch.linalg.lstsq(inputs, wanted).solution)

    def draw(self, latent: Tensor) -> Tensor:
        """Return a latent [1, channels, height, width] on the CPU as a small picture, uint8 [height, width, 3]."""
        height, width = latent.shape[2:]
        colours = _columns(latent.detach().float()) @ self._weights
        return (colours.clamp(0, 1) * 255).round().to(torch.uint8).reshape(height, width, 3)


def _columns(latent: Tensor) -> Tensor:
    """Return [1, channels, height, width] as [height * width, channels + 1]; the last column is 1."""
    flat = latent[0].flatten(1).T
    return torch.cat([flat, torch.ones(len(flat), 1)], dim=1)


_STREAM = "decode"


class ImageDecoding(Protocol):
    """The decoding of a finished image of a job, here (`Decoding`) or in another process."""

    job: EngineJob
    request: Request
    elsewhere: bool
    """Whether another process decodes, so that the device of this one may decode other images meanwhile."""
    area: int
    """Number of elements of the latent that this device decodes at once."""

    @property
    def seconds(self) -> float:
        """Seconds that another process has decoded, once `ready`; 0 if it is decoded here."""

    @property
    def spans(self) -> Sequence[Span]:
        """The times that this device spent."""

    @property
    def paused(self) -> bool:
        """Whether `enqueue` must be called again."""

    @property
    def ready(self) -> bool:
        """Whether decoding is finished, or has failed. Never waits."""

    @property
    def how(self) -> DecodedAs:
        """How the latent was decoded, once `ready`."""

    def enqueue(self, pause_due: Callable[[], bool] = ...) -> None:
        """Enqueue layers on this device."""

    def wait(self) -> None:
        """Wait until decoding is finished, or for a moment if another process decodes."""

    def take(self) -> Tensor:
        """Return the pixels, uint8 [height, width, 3] on the CPU. Raise BottegaError if there are none."""


class Decoding:
    """The decoding of a finished image of a job on the engine's device.

    It holds the latent, so that the latent's memory is not reused before decoding is finished.
    """

    def __init__(self, model: Model, job: EngineJob, request: Request) -> None:
        self.job = job
        self.request = request
        self._model = model
        self._latent = request.latent
        self._finite = model.runtime.to_host(torch.isfinite(self._latent).all())
        self._work = PausableWork(model.runtime, decode_in_pieces(model, self._latent))
        self.elsewhere = False
        self.seconds = 0.0
        self.area = model.decoded_area(self._latent.shape[-2] * self._latent.shape[-1])
        """Number of elements of the latent that are decoded at once."""
        self._known_bad = False
        self._copies: tuple[HostCopy, HostCopy] | None = None
        """The pixels, and whether the output of the VAE is finite."""

    @property
    def spans(self) -> Sequence[Span]:
        """The time that the device spent in each call of `enqueue`."""
        return self._work.spans

    @property
    def paused(self) -> bool:
        """Whether layers are left to enqueue."""
        return not self._known_bad and self._copies is None

    @property
    def ready(self) -> bool:
        """Whether decoding is finished. Never waits."""
        copies = (self._finite, *(self._copies or ()))
        return not self.paused and all(span.ready for span in self.spans) and all(copy.ready for copy in copies)

    @property
    def how(self) -> DecodedAs:
        """How the latent was decoded."""
        tiled = self._work.result is not None and self._work.result.tiled
        return self._model.decoder.as_decoded(tiled=tiled)

    def enqueue(self, pause_due: Callable[[], bool] = lambda: False) -> None:
        """Enqueue the layers that are left, or fewer if a pause is due; see `PausableWork.run`.

        A latent that is known not to be finite is not decoded.
        """
        device = self._model.runtime
        self._known_bad = self._finite.ready and not bool(self._finite.take())
        if self._known_bad:
            return
        with device.stream(_STREAM):
            self._work.run(pause_due)
            if (image := self._work.result) is not None:
                self._copies = device.to_host(image.pixels), device.to_host(image.finite)

    def wait(self) -> None:
        """Wait until decoding is finished. All layers must be enqueued."""
        for copy in (*reversed(self._copies or ()), self._finite):
            copy.take()
        for span in self.spans:
            span.end.wait()

    def take(self) -> Tensor:
        """Return the pixels, uint8 [height, width, 3] on the CPU. Wait if decoding is not finished.

        Raises:
            NotFinite: The latent, or the output of the VAE, has NaN or infinity.
        """
        if self._copies is None or not bool(self._finite.take()):
            raise not_finite(self.job.order.spec.loras, self.job.order.spec.controlnets)
        pixels, finite = self._copies
        if not bool(finite.take()):
            raise vae_not_finite("decoded a latent", self._model.decoder.dtype)
        return pixels.take()
