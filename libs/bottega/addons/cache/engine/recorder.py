"""The recording of a job for later ones: latents of its first picture, kept by reference while it is drawn."""

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
    """The recording of a job's first picture, computed exactly. The sender encodes it. Its tensors never change."""

    key: str
    """See `CacheRecording.key`."""
    model_hash: str
    spec: ResolvedSpec
    embedding: Tensor
    """Embedding of the prompt, float32 [width], on the CPU."""
    pixels: Tensor
    """uint8 [height, width, 3]."""
    latents: Mapping[int, Tensor]
    """[channels, height, width] by number of finished steps, on the engine's device."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in (self.embedding, self.pixels, *self.latents.values()))

    def small_picture(self) -> Tensor:
        """Return the picture, scaled to at most MAX_PICTURE_SIDE pixels a side. This takes milliseconds."""
        height, width, _ = self.pixels.shape
        share = min(1.0, MAX_PICTURE_SIDE / max(height, width))
        if share == 1.0:
            return self.pixels.contiguous()
        size = max(1, round(width * share)), max(1, round(height * share))
        image = PIL.Image.fromarray(self.pixels.numpy()).resize(size, PIL.Image.Resampling.BOX)
        return torch.from_numpy(np.array(image))


class LatentRecorder:
    """Keeps the latents of a job's first picture after those steps from which other pictures may start.

    Attributes:
        confirmed: Whether a store wants the recording.
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
        """Whether it keeps a latent, or will keep one."""
        return bool(self._latents) or any(step > self._request.step for step in self._steps)

    def confirm(self, *, wanted: bool) -> None:
        """Note whether a store wants the recording."""
        self.confirmed = wanted
        if not wanted:
            self._steps, self._latents, self._pixels = frozenset(), {}, None

    def after_step(self, request: Request) -> None:
        """Note that one of the job's pictures has made a step."""
        if request is self._request and request.step in self._steps:
            self._latents[request.step] = request.latent[0]  # Each step makes a new tensor.

    def after_decode(self, index: int, pixels: Tensor) -> None:
        """Note that one of the job's pictures is finished."""
        if index == self._request.index and self._latents:
            self._pixels = pixels

    def recording(self, record: EngineRecord, *, key: str, model_hash: str, embedding: Tensor) -> JobRecording | None:
        """Return the recording of a finished job; None if it was not computed exactly, or nothing was kept."""
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
    """Return the latents of a recording with their steps, ascending, on the CPU. Waits for the device."""
    # All copies begin before the first one is waited for.
    copies = [(step, open_device(latent.device).to_host(latent)) for step, latent in sorted(recording.latents.items())]
    return [(step, copy.take().contiguous()) for step, copy in copies]
