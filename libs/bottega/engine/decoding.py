"""The decoding of finished latents, which runs in parallel with the steps of other images.

It runs layer by layer in a stream of its own. On a GPU all layers are enqueued at once. On a CPU decoding may pause
between two layers, and the pixels exist when the last one has been enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bottega.device.device import HostCopy, PausableWork, Span
from bottega.engine.errors import not_finite, vae_not_finite
from bottega.engine.job import EngineJob
from bottega.engine.request import Request
from bottega.model.model import Model
from bottega.model.vae import decode_in_pieces

_STREAM = "decode"


class Decoding:
    """The decoding of a finished image of a job.

    It holds the latent, so that the latent's memory is not reused before decoding is finished.
    """

    def __init__(self, model: Model, job: EngineJob, request: Request) -> None:
        self.job = job
        self.request = request
        self._model = model
        self._latent = request.latent
        self._finite = model.runtime.to_host(torch.isfinite(self._latent).all())
        self._work = PausableWork(model.runtime, decode_in_pieces(model, self._latent))
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
    def tiled(self) -> bool:
        """Whether the latent was decoded in tiles."""
        return self._work.result is not None and self._work.result.tiled

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
