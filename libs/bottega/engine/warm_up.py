"""The warm-up of an engine, which measures its stages before the first job, in limited time.

On a CPU a picture of SDXL's usual size takes minutes. So a small picture is drawn first, and one of the usual size only
if that promises to be quick. Otherwise its time is estimated from the small one, in proportion to the pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bottega.device.pieces import run_pieces
from bottega.device.span import Span
from bottega.engine.decoding import Decoding
from bottega.engine.job import EngineJob, EngineOrder, open_job
from bottega.engine.request import Request
from bottega.engine.spans import DeviceClock
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model

# Side of the small picture's latent: for SDXL, 128 instead of 1024 pixels, and a 64th of the work.
_SMALL_SIDE = 16
# A picture of the model's usual size is encoded and decoded only if that is expected to take at most this long. It is
# done twice.
_LONGEST_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStages:
    """The measured time of a picture besides its steps."""

    job: EngineJob
    """A job whose rows are used to measure steps: of the model's usual size, or small if that takes too long."""
    fixed_s: float
    """Seconds for encoding and decoding one image of the model's usual size; estimated if `job` is small."""


@torch.inference_mode()
def sample_job(model: Model, device_clock: DeviceClock, *, small: bool = False) -> EngineJob:
    """Open a job of one image without add-ons, of the model's usual size or small, and encode its prompt."""
    defaults = model.defaults
    width, height = _small_size(model) if small else (defaults.width, defaults.height)
    spec = ResolvedSpec(
        prompt="",
        num_inference_steps=2,
        width=width,
        height=height,
        sampler=defaults.sampler,
        use_karras_sigmas=defaults.use_karras_sigmas,
    )
    return run_pieces(open_job(model, EngineOrder(key="", spec=spec), {}, 0.0, device_clock))


@torch.inference_mode()
def measure_stages(model: Model, device_clock: DeviceClock) -> MeasuredStages:
    """Run the stages of a small picture, and of one of the model's usual size if that is quick enough and fits.

    On a device whose memory is counted, it is always the usual size, to measure how much memory decoding needs.
    """
    defaults = model.defaults
    growth = defaults.width * defaults.height / math.prod(_small_size(model))
    if growth > 1 and model.memory.budget_bytes is None:
        for _ in range(2):  # The first run includes one-time work.
            job, encode_s, decode_s = _run_stages(model, device_clock, small=True)
        expected_s = encode_s + growth * decode_s
        area = defaults.width * defaults.height // model.latent_scale**2
        if expected_s > _LONGEST_S or not model.memory.fits_decoding(area):
            return MeasuredStages(job=job, fixed_s=expected_s)
    for _ in range(2):
        job, encode_s, decode_s = _run_stages(model, device_clock, small=False)
    return MeasuredStages(job=job, fixed_s=encode_s + decode_s)


def _run_stages(model: Model, device_clock: DeviceClock, *, small: bool) -> tuple[EngineJob, float, float]:
    """Encode and decode a sample job, and record the memory that decoding takes.

    Returns:
        The job, and the seconds of encoding and of decoding.
    """
    began = model.runtime.record()
    job = sample_job(model, device_clock, small=small)
    encoded = model.runtime.record()
    request = job.requests[0]
    peak_bytes = model.runtime.measure_peak(lambda: _decode(model, job, request))
    decoded = model.runtime.record()
    area = request.latent.shape[-2] * request.latent.shape[-1]
    model.memory.observe_decoding(model.decoded_area(area), peak_bytes)
    return job, Span(begin=began, end=encoded).seconds, Span(begin=encoded, end=decoded).seconds


def _decode(model: Model, job: EngineJob, request: Request) -> None:
    decoding = Decoding(model, job, request)
    decoding.enqueue()
    decoding.wait()


def _small_size(model: Model) -> tuple[int, int]:
    """Return width and height of the small picture, which is never larger than the model's usual size."""
    side = max(_SMALL_SIDE * model.latent_scale, model.size_multiple)
    return min(side, model.defaults.width), min(side, model.defaults.height)
