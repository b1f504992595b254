"""What an engine draws before its first job: a picture of the model's own size, to measure what its stages take."""

from __future__ import annotations

import torch

from bottega.diffusion.device.span import Span
from bottega.diffusion.engine.decoding import start_decoding
from bottega.diffusion.engine.job import EngineJob, EngineOrder, open_job
from bottega.diffusion.engine.spans import DeviceClock
from bottega.diffusion.model.model import Model
from bottega.diffusion.spec import ResolvedSpec


@torch.inference_mode()
def sample_job(model: Model, device_clock: DeviceClock) -> EngineJob:
    """A job of one image of the model's own size, without add-ons."""
    defaults = model.defaults
    spec = ResolvedSpec(
        prompt="",
        num_inference_steps=2,
        width=defaults.width,
        height=defaults.height,
        sampler=defaults.sampler,
        use_karras_sigmas=defaults.use_karras_sigmas,
    )
    return open_job(model, EngineOrder(key="", spec=spec), {}, 0.0, device_clock)


@torch.inference_mode()
def run_stages(model: Model, device_clock: DeviceClock) -> tuple[EngineJob, float]:
    """Encodes and decodes a sample job, and notes the memory that decoding takes.

    Returns the job, and the seconds of both.
    """
    began = model.runtime.record()
    job = sample_job(model, device_clock)
    request = job.requests[0]
    peak_bytes = model.runtime.measure_peak(lambda: start_decoding(model, job, request).wait())
    seconds = Span(begin=began, end=model.runtime.record()).seconds
    area = request.latent.shape[-2] * request.latent.shape[-1]
    model.memory.observe_decoding(model.decoded_area(area), peak_bytes)
    return job, seconds
