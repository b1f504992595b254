"""What a job has to give to later ones: latents of its first picture, kept by reference while it is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from bottega.diffusion.device.pick import open_device
from bottega.diffusion.engine.events import EngineRecord
from bottega.diffusion.engine.request import Request
from bottega.diffusion.spec import ResolvedSpec
from bottega.latents import recorded_steps
from bottega.latents.messages import MAX_PICTURE_SIDE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobRecording:
    """A job's first picture, computed exactly, as the engine has it: what takes time is done by whoever sends it.

    key, model_hash: see CacheRecording. spec: what was drawn. embedding: the prompt's, float32 [width], on the CPU.
    pixels: uint8 [height, width, 3]. latents: [channels, height, width] by the steps after which they were, on the
    engine's device. None is ever written to.
    """

    key: str
    model_hash: str
    spec: ResolvedSpec
    embedding: Tensor
    pixels: Tensor
    latents: Mapping[int, Tensor]

    @property
    def size_bytes(self) -> int:
        """Of all that it keeps in memory."""
        return sum(tensor.nbytes for tensor in (self.embedding, self.pixels, *self.latents.values()))

    def small_picture(self) -> Tensor:
        """Its pixels at no more than MAX_PICTURE_SIDE a side. It takes milliseconds."""
        height, width, _ = self.pixels.shape
        share = min(1.0, MAX_PICTURE_SIDE / max(height, width))
        if share == 1.0:
            return self.pixels.contiguous()
        size = max(1, round(width * share)), max(1, round(height * share))
        image = PIL.Image.fromarray(self.pixels.numpy()).resize(size, PIL.Image.Resampling.BOX)
        return torch.from_numpy(np.array(image))


class LatentRecorder:
    """Sees the steps of one job's first picture, and keeps its latents after those steps after which others may start.

    confirmed: whether somebody wants them.
    """

    def __init__(self, spec: ResolvedSpec, request: Request) -> None:
        # What a start saves no step by is of no use.
        steps = recorded_steps(spec.num_inference_steps)
        self.confirmed = False
        self._steps = frozenset(step for step in steps if request.first_step_from(step) > 0)
        # What the steps before a checkpoint had of stale residuals, nobody knows.
        if request.step > request.begin and spec.stale_residuals and spec.controlnets:
            self._steps = frozenset()
        self._spec = spec
        self._request = request
        self._latents: dict[int, Tensor] = {}
        self._pixels: Tensor | None = None
        self.after_step(request)

    @property
    def keeps(self) -> bool:
        """Whether there is, or will be, anything to keep."""
        return bool(self._latents) or any(step > self._request.step for step in self._steps)

    def confirm(self, *, wanted: bool) -> None:
        """Whether somebody wants a recording."""
        self.confirmed = wanted
        if not wanted:
            self._steps, self._latents, self._pixels = frozenset(), {}, None

    def after_step(self, request: Request) -> None:
        """One of the job's pictures has made a step."""
        if request is self._request and request.step in self._steps:
            self._latents[request.step] = request.latent[0]  # a step makes a new one

    def after_decode(self, index: int, pixels: Tensor) -> None:
        """One of the job's pictures is finished."""
        if index == self._request.index and self._latents:
            self._pixels = pixels

    def recording(self, record: EngineRecord, *, key: str, model_hash: str, embedding: Tensor) -> JobRecording | None:
        """Of the job that has ended with this record; None where it was not computed exactly, or there is nothing."""
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
    """Its latents with their steps, ascending, on the CPU. It waits for the device."""
    # All are on their way before the first one is waited for.
    copies = [(step, open_device(latent.device).to_host(latent)) for step, latent in sorted(recording.latents.items())]
    return [(step, copy.take().contiguous()) for step, copy in copies]
