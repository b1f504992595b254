"""The last stage of an image, in two phases: it is enqueued beside the steps of others, and its pixels are collected.

One at a time, in a stream of its own. On a CPU the pixels are there when the first phase is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.device.device import HostCopy
from bottega.diffusion.device.span import Span
from bottega.diffusion.engine.job import EngineJob
from bottega.diffusion.engine.request import Request
from bottega.diffusion.model.decode import decode_pixels
from bottega.diffusion.model.model import Model

_STREAM = "decode"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoding:
    """An image of a job that is being decoded. latent: what is read until it is over; its memory is nobody else's.

    finite: bool, whether the latent is free of NaN and infinities. span: of the decoding.
    """

    job: EngineJob
    request: Request
    latent: Tensor
    finite: HostCopy
    pixels: HostCopy | None
    span: Span

    @property
    def ready(self) -> bool:
        """Whether it is over. Never waits."""
        return self.finite.ready and self.span.ready and (self.pixels is None or self.pixels.ready)

    def wait(self) -> None:
        """Until it is over."""
        self.span.end.wait()
        self.take()

    def take(self) -> Tensor | None:
        """uint8 [height, width, 3] on the CPU; None where the latent is not finite. Waits where it is not over."""
        if self.pixels is None or not bool(self.finite.take()):
            return None
        return self.pixels.take()


@torch.inference_mode()
def start_decoding(model: Model, job: EngineJob, request: Request) -> Decoding:
    """Enqueues the decoding of a job's finished image. One that is known not to be finite is not decoded."""
    device, latent = model.runtime, request.latent
    finite = device.to_host(torch.isfinite(latent).all())
    with device.stream(_STREAM):
        began = device.record()
        known_bad = finite.ready and not bool(finite.take())
        pixels = None if known_bad else device.to_host(decode_pixels(model, latent))
        span = Span(begin=began, end=device.record())
    return Decoding(job=job, request=request, latent=latent, finite=finite, pixels=pixels, span=span)
