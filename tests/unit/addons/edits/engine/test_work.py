"""What blocks take: their names are those that a recording has, in its order, and their bytes those of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from diffusers import ModelMixin
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bottega.addons.edits.engine.masked.backbone import make_masked_backbone, transformer_blocks
from bottega.addons.edits.engine.masked.feature_maps import FeatureMaps, FullMaps
from bottega.addons.edits.engine.masked.tokens import MaskTokens
from bottega.addons.edits.engine.masked.work import BlockKind, BlockWork, blocks_of
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.engine.forward import stack
from bottega.model.rows import Row
from tests.samples.masked_networks import (
    LATENT,
    PROMPT_TOKENS,
    StepInMemory,
    box,
    masked,
    plain_row,
    recording,
    small_flux,
    small_joint,
    small_unet,
)

NETWORKS: dict[str, Callable[[], ModelMixin]] = {
    "linear": small_unet,
    "convolutions": partial(small_unet, use_linear_projection=False),
    "two layers": partial(small_unet, layers_per_block=2, transformer_layers_per_block=2),
    "attention everywhere": partial(
        small_unet,
        down_block_types=("CrossAttnDownBlock2D",) * 3,
        up_block_types=("CrossAttnUpBlock2D",) * 3,
    ),
    "joint": small_joint,
    "Flux": small_flux,
}
of_each_kind = pytest.mark.parametrize("network", ["linear", "joint", "Flux"])


@torch.no_grad()
def run(network: ModelMixin, row: Row, maps: FeatureMaps) -> None:
    backbone = make_masked_backbone(network, maps=maps)
    activations = backbone.begin(stack([row]))
    for block in backbone.blocks:
        block.run(activations)
    backbone.finish(activations)


def recorded(network: ModelMixin, size: tuple[int, int], *, sparse: bool) -> StepInMemory:
    step = StepInMemory()
    run(network, recording(plain_row(1, size=size), step), SparseMaps() if sparse else FullMaps())
    return step


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "full maps"])
@pytest.mark.parametrize("network", NETWORKS)
def test_blocks_have_the_names_and_bytes_of_a_recording_in_its_order(network: str, sparse: bool) -> None:
    size, made = (18, 14) if network in ("joint", "Flux") else (18, 13), NETWORKS[network]()
    step, blocks = recorded(made, size, sparse=sparse), blocks_of(made, size, sparse=sparse)
    assert [name for block in blocks for name in block.names] == list(step.outputs)
    for block in blocks:
        assert block.size_bytes == sum(step.outputs[name].nbytes for name in block.names), block.name
        assert [tuple(step.outputs[name].shape) for name in block.names] == list(block.shapes)
    transformers = [block for block in blocks if block.kind is BlockKind.TRANSFORMER]
    assert tuple(name for block in transformers for name in block.names) == transformer_blocks(made)
    modules = dict(made.named_modules())
    assert all(block.name in modules for block in blocks)
    assert len({block.name for block in blocks}) == len(blocks)


@of_each_kind
def test_operations_of_a_whole_row_are_those_that_it_makes(network: str) -> None:
    made = NETWORKS[network]()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(made, plain_row(1), FullMaps())
    said = sum(block.flops for block in blocks_of(made, LATENT, prompt_tokens=PROMPT_TOKENS))
    # The first convolution and embeddings are in no block.
    assert 0.9 < said / counter.get_total_flops() <= 1.0


def masked_flops(blocks: tuple[BlockWork, ...], tokens: MaskTokens) -> float:
    return sum(block.flops_at(tokens.at(*block.size).count / tokens.at(*block.size).total) for block in blocks)


@of_each_kind
def test_operations_of_a_masked_row_are_those_that_it_makes(network: str) -> None:
    made, size, computed = NETWORKS[network](), (32, 32), box(8, 8, 8, 12, size=(32, 32))
    step = recorded(made, size, sparse=False)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(made, masked(plain_row(2, size=size), step, computed), FullMaps())
    blocks = blocks_of(made, size, prompt_tokens=PROMPT_TOKENS)
    maps = sum(block.flops for block in blocks if block.kind is BlockKind.MAPS)
    tokens = MaskTokens(computed)
    transformers = tuple(block for block in blocks if block.kind is BlockKind.TRANSFORMER)
    said = maps + masked_flops(transformers, tokens)
    assert 0.9 < said / counter.get_total_flops() <= 1.0
    assert masked_flops(transformers, tokens) < 0.6 * sum(block.flops for block in transformers)
