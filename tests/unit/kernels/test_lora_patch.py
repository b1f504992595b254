"""LoRAs into weights by the kernel against sums in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bottega.kernels.lora_patch import PatchedLayer, lora_patch
from tests.support.poisoned import Poisoned

# Of the largest value: the interpreter cuts bfloat16 off, where a device rounds it.
ROUNDING = {torch.float32: 1e-6, torch.float16: 1.01 * 2**-11, torch.bfloat16: 1.01 * 2**-7}
# out, columns, rank: weights of one element, of parts of a tile and of several, ranks beyond one block.
SIZES = [(1, 1, 1), (64, 64, 16), (3, 130, 4), (65, 63, 33), (130, 70, 40), (16, 20, 7)]


def random_layer(size: tuple[int, int, int], dtype: torch.dtype, weight: Tensor | None = None) -> PatchedLayer:
    """weight: apart from what it is the sum of; without one, both are the same."""
    out, columns, rank = size
    generator = torch.Generator().manual_seed(sum(size))
    shapes = (out, columns), (out, rank), (rank, columns)
    before, up, down = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return PatchedLayer(weight=before if weight is None else weight, before=before, up=up, down=down)


def sum_of(layer: PatchedLayer) -> Tensor:
    return layer.before.double() + layer.up.double() @ layer.down.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_layer_of_a_set_becomes_its_sum_rounded_once(dtype: torch.dtype) -> None:
    outs = [Poisoned(size[:2], dtype) for size in SIZES]
    layers = [random_layer(size, dtype, out.tensor) for size, out in zip(SIZES, outs, strict=True)]
    lora_patch(layers)
    for layer, out in zip(layers, outs, strict=True):
        out.check()
        exact = sum_of(layer)
        assert (out.tensor.double() - exact).abs().max() <= ROUNDING[dtype] * exact.abs().max()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9])
def test_each_tile_finds_its_layer_whatever_their_number(count: int) -> None:
    """In place, as weights that are untouched are patched."""
    layers = [random_layer((1 + 65 * (place % 2), 10 + place, 2), torch.float32) for place in range(count)]
    expected = [sum_of(layer) for layer in layers]
    lora_patch(layers)
    for layer, exact in zip(layers, expected, strict=True):
        assert (layer.weight - exact).abs().max() < 1e-5


def test_an_empty_set_writes_nothing() -> None:
    lora_patch([])
