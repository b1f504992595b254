"""What blocks take: their names are those that a recording has, in its order, and their bytes those of its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bottega.addons.edits.engine.masked.backbone import MaskedBackbone, transformer_blocks
from bottega.addons.edits.engine.masked.feature_maps import FeatureMaps, FullMaps
from bottega.addons.edits.engine.masked.tokens import MaskTokens
from bottega.addons.edits.engine.masked.work import BlockKind, BlockWork, blocks_of
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.engine.forward import stack
from bottega.model.rows import Row
from tests.samples.masked_networks import LATENT, StepInMemory, box, masked, plain_row, recording, small_unet

NETWORKS: dict[str, dict[str, Any]] = {
    "linear": {},
    "convolutions": {"use_linear_projection": False},
    "two layers": {"layers_per_block": 2, "transformer_layers_per_block": 2},
    "attention everywhere": {
        "down_block_types": ("CrossAttnDownBlock2D",) * 3,
        "up_block_types": ("CrossAttnUpBlock2D",) * 3,
    },
}
TOKENS = 7


@torch.no_grad()
def run(unet: UNet2DConditionModel, row: Row, maps: FeatureMaps) -> None:
    backbone = MaskedBackbone(unet, maps=maps)
    activations = backbone.begin(stack([row]))
    for block in backbone.blocks:
        block.run(activations)
    backbone.finish(activations)


def recorded(unet: UNet2DConditionModel, size: tuple[int, int], *, sparse: bool) -> StepInMemory:
    step = StepInMemory()
    run(unet, recording(plain_row(1, size=size), step), SparseMaps() if sparse else FullMaps())
    return step


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "full maps"])
@pytest.mark.parametrize("network", NETWORKS)
def test_blocks_have_the_names_and_bytes_of_a_recording_in_its_order(network: str, sparse: bool) -> None:
    size = (18, 13)
    unet = small_unet(**NETWORKS[network])
    step, blocks = recorded(unet, size, sparse=sparse), blocks_of(unet, size, sparse=sparse)
    assert [name for block in blocks for name in block.names] == list(step.outputs)
    for block in blocks:
        assert block.size_bytes == sum(step.outputs[name].nbytes for name in block.names), block.name
    transformers = [block for block in blocks if block.kind is BlockKind.TRANSFORMER]
    assert tuple(name for block in transformers for name in block.names) == transformer_blocks(unet)
    modules = dict(unet.named_modules())
    assert all(block.name in modules for block in blocks)
    assert len({block.name for block in blocks}) == len(blocks)


def test_operations_of_a_whole_row_are_those_that_it_makes() -> None:
    unet = small_unet()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(unet, plain_row(1), FullMaps())
    said = sum(block.flops for block in blocks_of(unet, LATENT, prompt_tokens=TOKENS))
    # The first convolution and embeddings are in no block.
    assert 0.9 < said / counter.get_total_flops() <= 1.0


def masked_flops(unet: UNet2DConditionModel, blocks: tuple[BlockWork, ...], tokens: MaskTokens) -> float:
    return sum(block.flops_at(tokens.at(*block.size).count / tokens.at(*block.size).total) for block in blocks)


def test_operations_of_a_masked_row_are_those_that_it_makes() -> None:
    unet, size, computed = small_unet(), (32, 32), box(8, 8, 8, 12, size=(32, 32))
    step = recorded(unet, size, sparse=False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(unet, masked(plain_row(2, size=size), step, computed), FullMaps())
    blocks = blocks_of(unet, size, prompt_tokens=TOKENS)
    maps = sum(block.flops for block in blocks if block.kind is BlockKind.MAPS)
    tokens = MaskTokens(computed)
    transformers = tuple(block for block in blocks if block.kind is BlockKind.TRANSFORMER)
    said = maps + masked_flops(unet, transformers, tokens)
    assert 0.9 < said / counter.get_total_flops() <= 1.0
    assert masked_flops(unet, transformers, tokens) < 0.6 * sum(block.flops for block in transformers)
