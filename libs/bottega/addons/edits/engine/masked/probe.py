"""A self-check of the operations of masked rows, at the model's own size, with the model's current kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.addons.edits.engine.masked.packing import pack_rows
from bottega.addons.edits.engine.masked.tokens import MaskTokens
from bottega.addons.edits.engine.sparse.pieces import Tiles
from bottega.addons.edits.engine.sparse.rectangles import Rectangle
from bottega.engine.acceleration.acceleration import Probe
from bottega.model.model import Model

# Side of the probe's mask, as a share of the picture's: a fifth of the area.
_MASKED = 0.45
# Both halves of a guided request.
_ROWS = 2


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


def _middle(height: int, width: int) -> Rectangle:
    size = max(1, round(height * _MASKED)), max(1, round(width * _MASKED))
    return Rectangle(top=(height - size[0]) // 2, left=(width - size[1]) // 2, height=size[0], width=size[1])
