"""The engine's probes: computations by which accelerations are timed, at the model's usual size.

- forward: one forward pass of a guided request's two rows
- decode: one latent to pixels
- step: guidance and the Euler sampler's step of one image
- copies: two steps, and between them a copy of a latent to the host and of a recording to the device
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bottega.engine.acceleration.acceleration import Probe
from bottega.engine.forward import Prediction
from bottega.engine.guided_step import Guidance, guided_step
from bottega.model.decode import decode_image
from bottega.model.model import Model
from bottega.model.rows import Half, Row
from bottega.model.sampler_choices import SamplerChoice
from bottega.model.schedulers import SamplerKind

_GUIDANCE = Guidance(scale=5.0)
_STEPS, _STEP = 20, 8
# Size of the recording of one block of SDXL in bytes, and number of values that are compared.
_COPIED_BYTES = 16 << 20
_COMPARED_VALUES = 4096


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
        "decode": decode,
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
