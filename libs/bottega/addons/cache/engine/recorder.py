"""The cached latent that each picture of a job starts from, and the recording of its first picture for later jobs.

A `LatentSource` provides cached latents, and accepts recordings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from bottega.addons.cache.starts import format_start, recorded_steps
from bottega.addons.cache.wire import MAX_PICTURE_SIDE
from bottega.device.devices import open_device
from bottega.engine.events import EngineRecord
from bottega.engine.request import Request
from bottega.engine.spans import StoreWork
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.v1.cache_pb2 import CacheAnswer, CacheQuestion, CacheStart, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.generation_pb2 import CacheUse


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobRecording:
    """The recording of a job's first picture, which was computed exactly. Its tensors never change."""

    key: str
    """See `CacheRecording.key`."""
    plain_key: str = ""
    """Key of the same job without its LoRAs; see `CacheQuestion.plain_key`."""
    model_hash: str
    spec: ResolvedSpec
    embedding: Tensor
    """Embedding of the prompt, float32 [width], on the CPU."""
    pixels: Tensor
    """The picture, uint8 [height, width, 3]."""
    latents: Mapping[int, Tensor]
    """Latents [channels, height, width] on the engine's device, by the number of finished steps."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.embedding, self.pixels, *self.latents.values()))

    def small_picture(self) -> Tensor:
        """Return the picture, scaled down to at most MAX_PICTURE_SIDE pixels a side. This takes milliseconds."""
        height, width, _ = self.pixels.shape
        share = min(1.0, MAX_PICTURE_SIDE / max(height, width))
        if share == 1.0:
            return self.pixels.contiguous()
        size = max(1, round(width * share)), max(1, round(height * share))
        image = PIL.Image.fromarray(self.pixels.numpy()).resize(size, PIL.Image.Resampling.BOX)
        return torch.from_numpy(np.array(image))


class LatentRecorder:
    """Keeps the latents of a job's first picture after the steps from which other pictures may start.

    Attributes:
        confirmed: Whether the cache has asked for the recording.
    """

    def __init__(self, spec: ResolvedSpec, request: Request) -> None:
        # A latent is useful only if a start from it saves steps.
        steps = recorded_steps(spec.num_inference_steps)
        self.confirmed = False
        self._steps = frozenset(step for step in steps if request.first_step_from(step) > 0)
        # It is not known whether the steps before a checkpoint had stale residuals.
        if request.begun and spec.stale_residuals and spec.controlnets:
            self._steps = frozenset()
        self._spec = spec
        self._request = request
        self._latents: dict[int, Tensor] = {}
        self._pixels: Tensor | None = None
        self.after_step(request)

    @property
    def keeps(self) -> bool:
        """Whether the recorder has or will have a latent."""
        return bool(self._latents) or any(step > self._request.step for step in self._steps)

    def confirm(self, *, wanted: bool) -> None:
        """Record whether the cache wants the recording."""
        self.confirmed = wanted
        if not wanted:
            self._steps, self._latents, self._pixels = frozenset(), {}, None

    def after_step(self, request: Request) -> None:
        """Keep the latent of a picture of the job after a step, if it belongs to the recording."""
        if request is self._request and request.between_steps and request.step in self._steps:
            self._latents[request.step] = request.latent[0]  # Each step makes a new tensor.

    def after_decode(self, index: int, pixels: Tensor) -> None:
        """Keep the pixels of a finished picture of the job, if it is the recorded one."""
        if index == self._request.index and self._latents:
            self._pixels = pixels

    def recording(
        self, record: EngineRecord, *, key: str, plain_key: str, model_hash: str, embedding: Tensor
    ) -> JobRecording | None:
        """Return the recording of a finished job; None if the job was not computed exactly, or nothing was kept."""
        if not record.exact or self._pixels is None or not self._latents:
            return None
        return JobRecording(
            key=key,
            plain_key=plain_key,
            model_hash=model_hash,
            spec=self._spec,
            embedding=embedding,
            pixels=self._pixels,
            latents=self._latents,
        )


def latents_in_order(recording: JobRecording) -> Sequence[tuple[int, Tensor]]:
    """Return each step and its latent, ascending, on the CPU. Waits for the device."""
    # All copies begin before the first one is waited for.
    copies = [(step, open_device(latent.device).to_host(latent)) for step, latent in sorted(recording.latents.items())]
    return [(step, copy.take().contiguous()) for step, copy in copies]


@dataclass(slots=True, kw_only=True, eq=False)
class StartingPicture:
    """A picture that may start from a cached latent."""

    request: Request
    pinned: CacheStart | None = None
    """The latent that the picture must start from, and waits for before its first step; None if any latent will do."""
    hit: tuple[CacheStart, Tensor] | None = None
    """A latent that has arrived and that the picture may start from; None without one."""
    start: CacheStart | None = None
    """The latent that the picture has started from; None for noise."""
    started: CacheUse | None = None
    """The same, for the job's record."""

    @property
    def blocked(self) -> bool:
        """Whether the picture waits for the latent that it must start from."""
        return self.pinned is not None and self.started is None

    def first_step(self, start: CacheStart) -> int:
        """Return the first step that the picture computes if it starts from this latent."""
        return self.request.first_step_from(start.step)

    def is_beyond(self, start: CacheStart) -> bool:
        """Return whether the picture has already made the steps that the latent would save."""
        return self.request.step >= self.first_step(start)

    def mark_started(self, start: CacheStart, made_steps: int) -> None:
        """Record that the picture continues from this latent, in this attempt or since an earlier one.

        Args:
            made_steps: Steps that the picture had made from noise before.
        """
        self.hit = None
        self.start = start
        first = self.first_step(start)
        self.started = CacheUse(
            image=self.request.index,
            entry=format_start(start.entry, start.step),
            from_step=first,
            skipped_steps=max(0, first - made_steps),
            similarity=start.similarity,
            without_loras=start.without_loras,
        )

    def take_hit(self) -> str:
        """Start from `hit` if that is possible now, and return the outcome.

        Returns:
            "hits" if it started; "late_hits" or "unfit_hits" if it dropped `hit`; "held" if `hit` may be used later.

        Raises:
            InvalidRequest: The picture must start from `hit`, but its LoRAs are applied too late for that.
        """
        assert self.hit is not None, "checked by the caller"
        start, latent = self.hit
        request, first = self.request, self.first_step(start)
        if self.pinned is None and request.step + self._least_saved > first:
            self.hit = None
            return "late_hits"
        if request.spec.loras and not start.without_loras:
            # The entry was drawn with the LoRAs from its first step on, so that all steps after it need them as well.
            if request.loras_from is None:
                return "held"
            if request.loras_from > first:
                self.hit = None
                if self.pinned is not None:
                    raise InvalidRequest(
                        f"the LoRAs are applied at step {request.loras_from}, after step {first}, the first one after "
                        f"{format_start(start.entry, start.step)}"
                    )
                return "unfit_hits"
        # An earlier attempt that was lost may have made more wasted steps before it started from the same latent.
        made_steps = max(request.step, self.pinned.made_steps if self.pinned is not None else 0)
        request.start_from(latent, start.step)
        self.mark_started(start, made_steps)
        return "hits"

    @property
    def _least_saved(self) -> int:
        """Minimum number of steps that a latent must save.

        It is 2 if residuals of a step may be used in the next step: they may have been requested already, but do not
        fit the first step after the latent.
        """
        return 2 if self.request.spec.stale_residuals and self.request.controls else 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentQuestion:
    """A query for latents from which the pictures of a job may start."""

    header: CacheQuestion
    embedding: Tensor
    """Embedding of the prompt, float32 [width], on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentReply:
    """The response to a query."""

    header: CacheAnswer
    latents: tuple[Tensor, ...] = ()
    """The latents that the header lists, in its order, [channels, height, width] on the CPU; not to be changed."""
    work: StoreWork | None = None
    """Time that the cache spent on the query; None if no cache answered."""


class LatentSource(Protocol):
    """A source of cached latents. All calls come from the engine's thread and return at once."""

    @property
    def linked(self) -> int:
        """Number of caches that can receive a query now."""
        ...

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Set the caches that exist now. Without one, queries wait until there is one."""
        ...

    def ask(self, question: LatentQuestion) -> Future[LatentReply]:
        """Send a query, and return at once. A caller that no longer needs the response cancels the future.

        The future never fails. If no cache can answer, the response's outcome says so.
        """
        ...

    def report(self, reply: LatentReply, starts: CacheStarts) -> None:
        """Report how many steps latents of a response saved to the cache that sent it, if it counts them."""
        ...

    def record(self, recording: JobRecording) -> bool:
        """Send a recording in the background. Return False if the buffer is full, and the recording is dropped."""
        ...
