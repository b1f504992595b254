"""Probes for kernels that speed up features: LoRAs patched into weights, and the moves of masked rows.

Each has the model's own sizes and uses the model's current operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from bottega.diffusion.acceleration.acceleration import Probe
from bottega.diffusion.editing.masked.packing import pack_rows
from bottega.diffusion.editing.masked.tokens import MaskTokens
from bottega.diffusion.editing.sparse.pieces import Tiles
from bottega.diffusion.editing.sparse.rectangles import Rectangle
from bottega.diffusion.loras.lora import UNET
from bottega.diffusion.loras.patching import Patcher
from bottega.diffusion.model.model import Model
from bottega.diffusion.rows import Factors, LoraSet

_RANK = 32
# Bytes of weights that the probe's LoRA patches, which are copied meanwhile, and number of layers that are compared.
_PATCHED_BYTES = 256 << 20
_COMPARED_LAYERS = 4
# Side of the probe's mask, as a share of the picture's: a fifth of the area.
_MASKED = 0.45
# Both halves of a guided request.
_ROWS = 2


def feature_probes(model: Model) -> Mapping[str, Probe]:
    """Return the probes by name: "patch" and "masked"."""
    return {"patch": _patch_probe(model), "masked": masked_probe(model)}


def masked_probe(model: Model) -> Probe:
    """Return a probe that packs and merges tokens, and cuts and pastes tiles, for a mask in the middle of two rows."""
    height, width = model.defaults.height // model.latent_scale, model.defaults.width // model.latent_scale
    channels = int(model.backbone.unet.config.block_out_channels[0])
    generator = torch.Generator("cpu").manual_seed(0)
    maps = torch.randn(_ROWS, channels, height, width, generator=generator).to(model.device, model.dtype)
    recorded = torch.randn(height * width, channels, generator=generator).to(model.device, torch.float16)
    box = _middle(height, width)
    mask = torch.zeros(height, width, dtype=torch.bool)
    mask[box.rows, box.columns] = True
    tokens = MaskTokens(mask).at(height, width)

    def run() -> Sequence[Tensor]:
        moves = model.operations.moves
        packing = pack_rows([tokens] * _ROWS, height * width, model.device, moves)
        items = packing.pack(maps.flatten(2).transpose(1, 2))
        merged = packing.merge(items, [recorded] * _ROWS)
        rows = tuple(range(_ROWS))
        tiles = Tiles(rows=rows, rectangles=(box,) * _ROWS, size=(height, width), offsets=(*rows, _ROWS), moves=moves)
        cut = tiles.take([maps], margin=1)
        pasted = maps.clone()
        tiles.paste(pasted, tiles.core(cut, 1) * 2)
        return items, merged, cut, pasted

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


def _middle(height: int, width: int) -> Rectangle:
    size = max(1, round(height * _MASKED)), max(1, round(width * _MASKED))
    return Rectangle(top=(height - size[0]) // 2, left=(width - size[1]) // 2, height=size[0], width=size[1])
