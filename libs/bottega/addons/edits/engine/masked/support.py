"""Checks of masked rows: which networks they can be computed with, and whether their operations are exact."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.activations import GEGLU
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention, AttnProcessor2_0
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.unets.unet_2d_blocks import (
    CrossAttnDownBlock2D,
    CrossAttnUpBlock2D,
    DownBlock2D,
    UNetMidBlock2DCrossAttn,
    UpBlock2D,
)
from diffusers.models.upsampling import Upsample2D
from torch import Tensor

from bottega.addons.edits.engine.masked.tokens import MaskTokens, pack_rows
from bottega.addons.edits.engine.sparse.pieces import Rectangle, Tiles
from bottega.engine.acceleration.acceleration import Probe
from bottega.model.model import Model

_DOWN, _MIDDLE, _UP = (CrossAttnDownBlock2D, DownBlock2D), (UNetMidBlock2DCrossAttn,), (CrossAttnUpBlock2D, UpBlock2D)
_PARTS = {
    "resnets": ResnetBlock2D,
    "attentions": Transformer2DModel,
    "downsamplers": Downsample2D,
    "upsamplers": Upsample2D,
}
# Attributes of FreeU, which changes skip connections in the forward of up blocks.
_FREEU = ("s1", "s2", "b1", "b2")
# Optional parts of an attention layer besides its four projections.
_ADDITIONS = ("group_norm", "spatial_norm", "norm_cross", "norm_q", "norm_k", "added_kv_proj_dim")


def unsupported(unet: UNet2DConditionModel) -> str:
    """Return why masked rows cannot be computed with a network, as a clause; empty if they can."""
    return next(chain(_reasons(unet), _of_inputs(unet)), "")


def _reasons(unet: UNet2DConditionModel) -> Iterator[str]:
    if type(unet) is not UNet2DConditionModel:
        yield f"the network is a {type(unet).__name__}"
        return
    middle = () if unet.mid_block is None else (unet.mid_block,)  # pruned models may have none
    for known, blocks in ((_DOWN, unet.down_blocks), (_MIDDLE, middle), (_UP, unet.up_blocks)):
        for block in blocks:
            if type(block) not in known:
                yield f"the network has a {type(block).__name__}"
                return
            if any(getattr(block, each, None) for each in _FREEU):
                yield "FreeU is on"
            for name, kind in _PARTS.items():
                for module in getattr(block, name, None) or ():
                    if type(module) is not kind:
                        yield f"{name} has a {type(module).__name__}"
                    elif isinstance(module, Transformer2DModel):
                        yield from _of_transformer(module)
            for downsampler in getattr(block, "downsamplers", None) or ():
                if not downsampler.use_conv or downsampler.padding != 1:
                    yield "a downsampler is not a convolution with padding 1"


def _of_inputs(unet: UNet2DConditionModel) -> Iterator[str]:
    if unet.config.in_channels != unet.config.out_channels:
        yield "the network reads the mask itself"


def _of_transformer(transformer: Transformer2DModel) -> Iterator[str]:
    if not transformer.is_input_continuous:
        yield "a transformer does not read feature maps"
    if not transformer.transformer_blocks:
        yield "a transformer has no block"
    for block in transformer.transformer_blocks:
        if type(block) is not BasicTransformerBlock:
            yield f"a transformer has a {type(block).__name__}"
            return
        if block.norm_type != "layer_norm" or block.pos_embed is not None or hasattr(block, "fuser"):
            yield f"a transformer block has {block.norm_type} and more than attention and feed-forward"
        if block.only_cross_attention or block.double_self_attention or block.attn2 is None:
            yield "a transformer block does not have one self-attention and one cross-attention"
            return
        if type(block.ff.net[0]) is not GEGLU or block._chunk_size is not None:
            yield "a feed-forward layer is not a GEGLU in one piece"
        for attention in (block.attn1, block.attn2):
            yield from _of_attention(attention)


def _of_attention(attention: Attention) -> Iterator[str]:
    if type(attention.processor) is not AttnProcessor2_0:
        yield f"an attention layer has the processor {type(attention.processor).__name__}"
    if any(getattr(attention, each, None) is not None for each in _ADDITIONS):
        yield "an attention layer has norms or projections of its own"
    if attention.residual_connection or attention.rescale_output_factor != 1.0:
        yield "an attention layer adds its input or scales its output"
    if attention.inner_kv_dim != attention.inner_dim or attention.fused_projections or not attention.scale_qk:
        yield "an attention layer shares or fuses its projections"


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
