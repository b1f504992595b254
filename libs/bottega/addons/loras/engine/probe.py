"""A self-check of merging, with layers of the model's own sizes and the model's current kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from bottega.addons.loras.engine.lora import UNET
from bottega.addons.loras.engine.patching import Patcher
from bottega.engine.acceleration.acceleration import Probe
from bottega.model.model import Model
from bottega.model.rows import Factors, LoraSet

_RANK = 32
# Bytes of weights that the probe's LoRA patches, which are copied meanwhile, and number of layers that are compared.
_PATCHED_BYTES = 256 << 20
_COMPARED_LAYERS = 4


def patch_probe(model: Model) -> Probe:
    """Return a probe that merges a LoRA and restores the weights bit for bit."""
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
    """Yield projections of attention, which most LoRAs change, up to a total size."""
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
