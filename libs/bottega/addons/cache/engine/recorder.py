"""The recording of a job for later jobs: latents of its first picture, kept by reference while it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from bottega.addons.cache.wire import recorded_steps
from bottega.addons.cache.wire.messages import MAX_PICTURE_SIDE
from bottega.device.pick import open_device
from bottega.engine.events import EngineRecord
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobRecording:
    """The recording of a job's first picture, which was computed exactly. Its tensors never change."""

    key: str
    """See `CacheRecording.key`."""
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
        if request.step > request.begin and spec.stale_residuals and spec.controlnets:
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
        if request is self._request and request.step in self._steps:
            self._latents[request.step] = request.latent[0]  # Each step makes a new tensor.

    def after_decode(self, index: int, pixels: Tensor) -> None:
        """Keep the pixels of a finished picture of the job, if it is the recorded one."""
        if index == self._request.index and self._latents:
            self._pixels = pixels

    def recording(self, record: EngineRecord, *, key: str, model_hash: str, embedding: Tensor) -> JobRecording | None:
        """Return the recording of a finished job; None if the job was not computed exactly, or nothing was kept."""
        if not record.exact or self._pixels is None or not self._latents:
            return None
        return JobRecording(
            key=key,
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
