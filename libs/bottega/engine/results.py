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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bottega import rules
from bottega.device.device import HostCopy, PausableWork, Span
from bottega.engine.checkpoint import JobCopy, write_checkpoint
from bottega.engine.encode import LatentPreview
from bottega.engine.errors import not_finite, vae_not_finite
from bottega.engine.events import Event, JobAdvanced, JobCheckpointed
from bottega.engine.job import EngineJob
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.waiting import WaitingOrders
from bottega.model.decode import check_decodable, decode_in_pieces
from bottega.model.model import Model
from bottega.model.vae import DecodedAs

_log = logging.getLogger(__name__)


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
        limits: Limits with the shortest intervals of reports and checkpoints.
    """

    def __init__(self, model: Model, limits: EngineLimits) -> None:
        self._model = model
        self._limits = limits
        self._preview = LatentPreview.fit(model)
        self._reports: dict[EngineJob, deque[_Advance | _Snapshot]] = {}

    @property
    def jobs(self) -> Sequence[EngineJob]:
        """Jobs with pending reports."""
        return list(self._reports)

    def note_step(self, job: EngineJob, now_s: float) -> None:
        """Begin a progress report and a checkpoint if they are due, after a step of the job."""
        ended = job.steps_done == job.steps_total
        if ended or now_s - job.reported_s >= self._limits.progress_interval_s:
            job.reported_s = now_s
            shown = job.previewed()
            preview = self._model.runtime.to_host(shown.estimate) if job.order.preview else None
            self._add(job, _Advance(steps_done=job.steps_done, preview_index=shown.index, preview=preview))
        if not ended and job.checkpoint_due(now_s, self._limits.checkpoint_interval_s):
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
            if isinstance(report, _Advance):
                yield self._advanced(job, report)
            elif (checkpoint := self._checkpoint(job, report)) is not None:
                yield checkpoint
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

    def _checkpoint(self, job: EngineJob, snapshot: _Snapshot) -> JobCheckpointed | None:
        """Return a checkpoint; None if it is too large to be sent."""
        saved = snapshot.copy.take()
        if not all(bool(torch.isfinite(image.latent).all()) for image in saved.images):
            raise not_finite(job.order.spec.loras, job.order.spec.controlnets)
        data = write_checkpoint(self._model, job.order.spec, saved)
        if len(data) > rules.MAX_CHECKPOINT_BYTES:
            facts = {"bytes": len(data), "most_bytes": rules.MAX_CHECKPOINT_BYTES}
            _log.warning("a job's state is too large for a checkpoint; it cannot be resumed elsewhere", extra=facts)
            job.checkpoint_steps = job.steps_total  # None is due any more: later ones would be as large.
            return None
        return JobCheckpointed(key=job.key, steps_done=snapshot.steps_done, data=data)


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


class Decodings:
    """The decodings of finished images that are under way: one at a time on the device, and others elsewhere.

    Args:
        jobs: The jobs whose prompts have been encoded, by key.
        waiting: The jobs whose prompts and pictures have not.
    """

    def __init__(self, model: Model, jobs: Mapping[Hashable, EngineJob], waiting: WaitingOrders) -> None:
        self._model = model
        self._jobs = jobs
        self._waiting = waiting
        self._under_way: dict[Request, ImageDecoding] = {}

    @property
    def paused(self) -> list[ImageDecoding]:
        """Decodings that have layers to enqueue: `run` goes on with them."""
        return [decoding for decoding in self._under_way.values() if decoding.paused]

    def due(self) -> list[EngineJob]:
        """Return the jobs with an image that may be decoded now, or go on being decoded.

        The device decodes one image at a time. Without memory for one more image beside those that are being decoded,
        these are finished first.
        """
        if not all(decoding.paused or decoding.elsewhere for decoding in self._under_way.values()):
            return []
        return [job for job in self._jobs.values() if self._is_due(job)]

    def next_job(self, used: Callable[[str], float], may_go_first: Callable[[str], bool]) -> EngineJob | None:
        """Return the job whose image is decoded next; None if none may be.

        It is the oldest of the tenant that has used the device least. It waits while another tenant that has used less
        has requests to denoise.

        Args:
            used: Returns how much of the device a tenant has used.
            may_go_first: Returns whether a tenant may use the device now.
        """
        due = self.due()
        if not due:
            return None
        job = min(due, key=lambda job: (used(job.order.share.tenant), self._paused(job) is None))
        return job if may_go_first(job.order.share.tenant) else None

    def run(
        self,
        job: EngineJob,
        *,
        pause_due: Callable[[], bool],
        covered: Callable[[tuple[object, ...]], AbstractContextManager[None]],
    ) -> Span | None:
        """Decode a finished image of a job, or a part of it if a pause is due, whose time is then returned.

        Args:
            covered: See `Denoiser.covered`.
        """
        decoding = self._paused(job) or self._begin(job)
        self._under_way[decoding.request] = decoding
        with covered(("decode", decoding.request.latent.shape, len(decoding.spans))):
            decoding.enqueue(pause_due)
        return decoding.spans[-1] if decoding.paused else None

    def take_ready(self) -> ImageDecoding | None:
        """Remove and return a finished decoding; None if there is none."""
        decoding = next((decoding for decoding in self._under_way.values() if decoding.ready), None)
        return None if decoding is None else self._under_way.pop(decoding.request)

    def wait(self) -> bool:
        """Wait for the oldest decoding, see `ImageDecoding.wait`. Return False if there is none."""
        decoding = next(iter(self._under_way.values()), None)
        if decoding is not None:
            decoding.wait()
        return decoding is not None

    def forget(self, job: EngineJob) -> None:
        """Drop the decodings of a job."""
        for request in job.requests:
            self._under_way.pop(request, None)

    def area_beside(self, area: int) -> int:
        """Return how many elements of latents may be decoded beside forwards of latents of this area."""
        return max(self._area(), self._model.decoded_area(area))

    def _area(self) -> int:
        """Return the number of elements of latents that are being decoded, or encoded from an image."""
        scale = self._model.latent_scale
        specs = [order.order.spec for order in self._waiting if order.encodes_image]
        encoded = sum(self._model.decoded_area((spec.height // scale) * (spec.width // scale)) for spec in specs)
        return encoded + sum(decoding.area for decoding in self._under_way.values())

    def _is_due(self, job: EngineJob) -> bool:
        if self._paused(job) is not None:
            return True
        return (request := job.undrawn(self._under_way)) is not None and self._has_room(request)

    def _paused(self, job: EngineJob) -> ImageDecoding | None:
        return next((decoding for decoding in self.paused if decoding.job is job), None)

    def _has_room(self, request: Request) -> bool:
        """Return whether there is memory to decode an image beside those that are being decoded."""
        under_way, area = self._area(), request.latent.shape[-2] * request.latent.shape[-1]
        return not under_way or self._model.memory.fits_decoding(under_way + self._model.decoded_area(area))

    def _begin(self, job: EngineJob) -> ImageDecoding:
        request = job.undrawn(self._under_way)
        assert request is not None, "one of its images is finished"
        begun = (part.decode(request) for part in job.addons.values())
        elsewhere = next((decoding for decoding in begun if decoding is not None), None)
        if elsewhere is not None:
            return elsewhere
        check_decodable(self._model, request.latent)
        return Decoding(self._model, job, request)


def decoded_pixels(decoding: ImageDecoding) -> Tensor:
    """Return the pixels of a finished decoding, uint8 [height, width, 3], and record in its job how they were made.

    Raises:
        BottegaError: The decoding failed, or an input of the job has NaN or infinity.
    """
    job = decoding.job
    job.check_inputs(to_the_end=True)
    pixels = decoding.take()
    job.note_decoding(decoding.how)
    job.note_elsewhere("decode", decoding.seconds)
    for span in decoding.spans:
        job.seconds["decode"] += span.seconds
        job.spans.add_of_device(f"decode image {decoding.request.index}", "decode", span, {})
    return pixels
