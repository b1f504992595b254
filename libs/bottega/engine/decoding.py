"""The decoding of finished latents, which runs in parallel with the steps of other images.

One image is decoded at a time, in its own stream. On a CPU, decoding is done when it has been enqueued.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.device.device import HostCopy
from bottega.device.span import Span
from bottega.engine.errors import not_finite, vae_not_finite
from bottega.engine.job import EngineJob
from bottega.engine.request import Request
from bottega.model.decode import DecodedLatent, decode_image
from bottega.model.model import Model

_STREAM = "decode"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoding:
    """An image of a job that is being decoded."""

    job: EngineJob
    request: Request
    latent: Tensor
    """The VAE's input, held so that its memory is not reused before decoding is finished."""
    finite: HostCopy
    """One bool: whether the latent has neither NaN nor infinity."""
    image: DecodedLatent | None
    """Output of the VAE on the device; None if the latent was known to have NaN or infinity."""
    image_finite: HostCopy | None
    pixels: HostCopy | None
    span: Span
    """The time that the device spent decoding."""

    @property
    def ready(self) -> bool:
        """Whether decoding is finished. Never waits."""
        copies = (self.finite, self.image_finite, self.pixels)
        return self.span.ready and all(copy is None or copy.ready for copy in copies)

    @property
    def tiled(self) -> bool:
        """Whether the latent was decoded in tiles."""
        return self.image is not None and self.image.tiled

    def wait(self) -> None:
        """Wait until decoding is finished."""
        self.span.end.wait()
        for copy in (self.finite, self.image_finite, self.pixels):
            if copy is not None:
                copy.take()

    def take(self, model: Model) -> Tensor:
        """Return the pixels, uint8 [height, width, 3] on the CPU. Wait if decoding is not finished.

        Raises:
            NotFinite: The latent, or the output of the VAE, has NaN or infinity.
        """
        if self.pixels is None or self.image_finite is None or not bool(self.finite.take()):
            raise not_finite(self.job.order.spec.loras, self.job.order.spec.controlnets)
        if not bool(self.image_finite.take()):
            raise vae_not_finite("decoded a latent", model.decoder.dtype)
        return self.pixels.take()


@torch.inference_mode()
def start_decoding(model: Model, job: EngineJob, request: Request) -> Decoding:
    """Enqueue the decoding of a job's finished image, unless its latent is known to have NaN or infinity."""
    device, latent = model.runtime, request.latent
    finite = device.to_host(torch.isfinite(latent).all())
    with device.stream(_STREAM):
        began = device.record()
        known_bad = finite.ready and not bool(finite.take())
        image = None if known_bad else decode_image(model, latent)
        image_finite = None if image is None else device.to_host(image.finite)
        pixels = None if image is None else device.to_host(image.pixels)
        span = Span(begin=began, end=device.record())
    return Decoding(
        job=job,
        request=request,
        latent=latent,
        finite=finite,
        image=image,
        image_finite=image_finite,
        pixels=pixels,
        span=span,
    )
