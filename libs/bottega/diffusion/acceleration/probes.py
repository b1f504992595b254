"""The probes by which accelerations are timed, at the model's own sizes, with the model's current operations.

forward   a step of a guided request's two rows decode    one latent to pixels patch     a LoRA patched into layers of
the network, and removed step      guidance and the Euler sampler's step of one image copies    two steps, and between
them a latent copied to the host and a recording copied to the device masked    tokens packed and merged, and tiles cut
and pasted, for a mask of a fifth of the picture
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bottega.diffusion.acceleration.acceleration import Probe
from bottega.diffusion.acceleration.kernels.probes import masked_probe, step_probe
from bottega.diffusion.engine.forward import Prediction
from bottega.diffusion.loras.lora import UNET
from bottega.diffusion.loras.patching import Patcher
from bottega.diffusion.model.decode import decode_image
from bottega.diffusion.model.model import Model
from bottega.diffusion.rows import Factors, LoraSet, Row

_RANK = 32
# Bytes of weights that the probe's LoRA patches, which are copied meanwhile, and number of layers that are compared.
_PATCHED_BYTES = 256 << 20
_COMPARED_LAYERS = 4
# Bytes of a recorded SDXL block, and number of values that are compared.
_COPIED_BYTES = 16 << 20
_COMPARED_VALUES = 4096


def engine_probes(
    model: Model, predict: Callable[[Sequence[Row]], Prediction], rows: Sequence[Row], latent: Tensor
) -> Mapping[str, Probe]:
    """Return the probes by name. `rows` and `latent` are of one step of a request of the model's own size."""

    def forward() -> Sequence[Tensor]:
        noise = predict(rows).noise
        return [noise[row] for row in rows]

    def decode() -> Sequence[Tensor]:
        return [decode_image(model, latent).pixels]

    return {
        "copies": _copies_probe(model, predict, rows, latent),
        "forward": forward,
        "decode": decode,
        "patch": _patch_probe(model),
        "step": step_probe(model),
        "masked": masked_probe(model),
    }


def _copies_probe(
    model: Model, predict: Callable[[Sequence[Row]], Prediction], rows: Sequence[Row], latent: Tensor
) -> Probe:
    """Return a probe of copies as in an engine's turns: while the thread waits for a copy, it enqueues no work."""
    device = model.runtime
    generator = torch.Generator("cpu").manual_seed(0)
    kept = torch.randn(_COPIED_BYTES // model.dtype.itemsize, generator=generator).to(model.dtype)

    def run() -> Sequence[Tensor]:
        first = predict(rows).noise
        copy = device.to_host(latent)
        there = device.to_device(kept)
        second = predict(rows).noise
        values = there[:: max(1, there.numel() // _COMPARED_VALUES)]
        return [copy.take(), values, *(noise[row] for noise in (first, second) for row in rows)]

    return run


def _patch_probe(model: Model) -> Probe:
    """Return a probe that patches a LoRA and restores the weights bit for bit."""
    unet = model.backbone.unet
    layers = dict(_layers(unet))
    generator = torch.Generator("cpu").manual_seed(0)
    factors = {path: _factors(layer, generator) for path, layer in layers.items()}
    loras = LoraSet(key=(("self-check", 1.0),), components={UNET: factors})
    compared = list(layers.values())[:_COMPARED_LAYERS]

    def run() -> Sequence[Tensor]:
        patcher = Patcher(unet, UNET, operations=model.operations)
        try:
            patcher.patch(loras)
            return [layer.weight.detach().clone() for layer in compared]
        finally:
            patcher.restore()

    return run


def _layers(unet: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield projections of attention, which most LoRAs patch, up to a total size."""
    size_bytes = 0
    for path, module in unet.named_modules():
        if isinstance(module, nn.Linear) and path.endswith((".to_q", ".to_k", ".to_v", ".to_out.0")):
            size_bytes += module.weight.nbytes
            if size_bytes > _PATCHED_BYTES:
                return
            yield path, module


def _factors(layer: nn.Linear, generator: torch.Generator) -> Factors:
    weight = layer.weight
    down = torch.randn(_RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
    up = torch.randn(weight.shape[0], _RANK, generator=generator) * 0.05
    return Factors(down=down.to(weight), up=up.to(weight))
