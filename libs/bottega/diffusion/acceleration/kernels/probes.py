"""Probes for kernels that neither a forward nor a decoding shows: the sampler's step, and masked rows' moves.

Each has the model's own sizes and uses the model's current operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bottega.diffusion.acceleration.acceleration import Probe
from bottega.diffusion.editing.masked.packing import pack_rows
from bottega.diffusion.editing.masked.tokens import MaskTokens
from bottega.diffusion.editing.sparse.pieces import Tiles
from bottega.diffusion.editing.sparse.rectangles import Rectangle
from bottega.diffusion.engine.guided_step import Guidance, guided_step
from bottega.diffusion.model.model import Model
from bottega.diffusion.model.sampler_choices import SamplerChoice
from bottega.diffusion.model.samplers import SamplerKind
from bottega.diffusion.rows import Half

_GUIDANCE = Guidance(scale=5.0)
_STEPS, _STEP = 20, 8
# Side of the probe's mask, as a share of the picture's: a fifth of the area.
_MASKED = 0.45
# Both halves of a guided request.
_ROWS = 2


def step_probe(model: Model) -> Probe:
    """Return a probe of guidance and a sampler step for one image, with Euler if the model supports it."""
    shape = (model.latent_channels, *_latent_size(model))
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


def masked_probe(model: Model) -> Probe:
    """Return a probe that packs and merges tokens, and cuts and pastes tiles, for a mask in the middle of two rows."""
    height, width = _latent_size(model)
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


def _latent_size(model: Model) -> tuple[int, int]:
    return model.defaults.height // model.latent_scale, model.defaults.width // model.latent_scale


def _middle(height: int, width: int) -> Rectangle:
    size = max(1, round(height * _MASKED)), max(1, round(width * _MASKED))
    return Rectangle(top=(height - size[0]) // 2, left=(width - size[1]) // 2, height=size[0], width=size[1])
