"""The warm-up of an engine, which measures its stages before the first job, and probes, which time accelerations.

On a CPU a picture of SDXL's usual size takes minutes. So a small picture is drawn first, and one of the usual size only
if that promises to be quick. Otherwise its time is estimated from the small one, in proportion to the pixels.

The engine's probes are computations of the model's usual size:

- forward: one forward pass of a guided request's two rows
- decode: one latent to pixels
- step: guidance and the Euler sampler's step of one image
- copies: two steps, and between them a copy of a latent to the host and of a recording to the device
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.device.device import Span, run_pieces
from bottega.engine.acceleration.acceleration import Probe
from bottega.engine.addon import EngineAddOn
from bottega.engine.encode import sample_conditions
from bottega.engine.forward import Prediction
from bottega.engine.job import EngineJob, EngineOrder
from bottega.engine.latent_step import Guidance, guided_step
from bottega.engine.request import Request
from bottega.engine.results import Decoding
from bottega.engine.spans import DeviceClock
from bottega.engine.spec import ResolvedSpec
from bottega.engine.waiting import open_job
from bottega.model.decode import decode_image
from bottega.model.model import Model
from bottega.model.rows import Half, Row
from bottega.model.sampler_choices import SamplerChoice
from bottega.model.schedulers import SamplerKind

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
    """Open a job of one image without add-ons, of the model's usual size or small, and encode its prompt.

    If the device's memory has a budget, and prompts are not padded to one length, the prompt has the largest length,
    which needs the most memory.
    """
    defaults, counted = model.defaults, model.memory.budget_bytes is not None
    width, height = _small_size(model) if small else (defaults.width, defaults.height)
    spec = ResolvedSpec(
        prompt="a " * model.family.max_sequence_length if counted and model.family.reads_chat else "",
        num_inference_steps=2,
        width=width,
        height=height,
        sampler=defaults.sampler,
        use_karras_sigmas=defaults.use_karras_sigmas,
    )
    order, conditions = EngineOrder(key="", spec=spec), [sample_conditions(model, spec)]
    return run_pieces(open_job(model, order, {}, 0.0, device_clock, conditions=conditions))


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
    if not model.decodes:
        return job, Span(begin=began, end=encoded).seconds, 0.0
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


_GUIDANCE = Guidance(scale=5.0)
_STEPS, _STEP = 20, 8
# Size of the recording of one block of SDXL in bytes, and number of values that are compared.
_COPIED_BYTES = 16 << 20
_COMPARED_VALUES = 4096


def all_probes(
    model: Model,
    predict: Callable[[Sequence[Row]], Prediction],
    addons: Sequence[EngineAddOn],
    device_clock: DeviceClock,
) -> Mapping[str, Probe]:
    """Return the engine's probes and those of add-ons, by name."""
    request = sample_job(model, device_clock).requests[0]
    probes = dict(engine_probes(model, predict, request.rows(), request.latent))
    for addon in addons:
        probes.update({name: make(model) for name, make in addon.probes.items()})
    return probes


def engine_probes(
    model: Model, predict: Callable[[Sequence[Row]], Prediction], rows: Sequence[Row], latent: Tensor
) -> Mapping[str, Probe]:
    """Return the probes by name. `rows` and `latent` are of one step of a request of the model's usual size."""

    def forward() -> Sequence[Tensor]:
        noise = predict(rows).noise
        return [noise[row] for row in rows]

    def decode() -> Sequence[Tensor]:
        return [decode_image(model, latent).pixels]

    return {
        "copies": _copies_probe(model, predict, rows, latent),
        "forward": forward,
        **({"decode": decode} if model.decodes else {}),
        "step": step_probe(model),
    }


def _copies_probe(
    model: Model, predict: Callable[[Sequence[Row]], Prediction], rows: Sequence[Row], latent: Tensor
) -> Probe:
    """Return a probe of copies as the engine makes them: a thread that waits for a copy enqueues nothing."""
    device = model.runtime
    generator = torch.Generator("cpu").manual_seed(0)
    kept = torch.randn(_COPIED_BYTES // model.dtype.itemsize, generator=generator).to(model.dtype)

    def run() -> Sequence[Tensor]:
        first = predict(rows).noise
        copy = device.to_host(latent)
        copied = device.to_device(kept)
        second = predict(rows).noise
        values = copied[:: max(1, copied.numel() // _COMPARED_VALUES)]
        return [copy.take(), values, *(noise[row] for noise in (first, second) for row in rows)]

    return run


def step_probe(model: Model) -> Probe:
    """Return a probe of guidance and a sampler step for one image, with Euler if the model supports it."""
    height, width = model.defaults.height // model.latent_scale, model.defaults.width // model.latent_scale
    shape = (model.latent_channels, height, width)
    generator = torch.Generator("cpu").manual_seed(0)
    latent, *noise = (torch.randn(shape, generator=generator).to(model.device, model.dtype) for _ in range(3))
    halves = dict(zip(Half, noise, strict=True))
    euler = SamplerChoice(kind=SamplerKind.EULER)
    choice = model.samplers.default_choice(model.defaults.sampler) if model.samplers.refusals[euler] else euler

    def run() -> Sequence[Tensor]:
        sampler = model.samplers.open(choice, steps=_STEPS, begin=_STEP)
        sampler.model_input(latent[None], _STEP)
        return guided_step(
            sampler, _STEP, latent[None], halves, guidance=_GUIDANCE, generator=None, operations=model.operations
        )

    return run
