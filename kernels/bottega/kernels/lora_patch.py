"""Patches LoRAs into weights in place, all layers of a set in one launch: weight = before + up @ down, rounded once.

torch takes several launches for each of several hundred layers, and in half precision casts each weight to float32 and
back through memory. Here a table on the device locates the layers, and each program finds its tile's layer in it.

Shapes: weight and before [out, columns], up [out, rank], down [rank, columns], all contiguous and of one dtype:
float32, float16 or bfloat16. `before` may be the weight itself. Products are summed in full float32 precision, also
where torch would use TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from bottega.kernels.kernel import Case, ceil_div, jit

# Side of the tile of the weight that a program writes, and the part of the rank per product, at least 16.
_TILE, _RANK = 64, 32
# Fields of a layer in the table.
_FIELDS = 7
# Alignment for vector loads: of addresses in bytes, of lengths in elements.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchedLayer:
    """A weight, and the tensors from which it is computed; the module's docstring lists the shapes."""

    weight: Tensor
    before: Tensor
    up: Tensor
    down: Tensor


@jit
def _patch(
    layers: tl.tensor,
    first_tiles: tl.tensor,
    some_weight: tl.tensor,
    count: tl.tensor,
    fields: tl.constexpr,
    halvings: tl.constexpr,
    aligned: tl.constexpr,
    widen: tl.constexpr,
    tile: tl.constexpr,
    block_r: tl.constexpr,
) -> None:
    number = tl.program_id(0)
    # Find the last layer whose first tile is not after this one.
    low = number * 0
    high = number * 0 + count
    for _ in tl.static_range(halvings):
        middle = (low + high) // 2
        before = tl.load(first_tiles + middle) <= number
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    entry = layers + low * fields
    weight = tl.load(entry).to(some_weight.dtype)
    source = tl.load(entry + 1).to(some_weight.dtype)
    up = tl.load(entry + 2).to(some_weight.dtype)
    down = tl.load(entry + 3).to(some_weight.dtype)
    out = tl.load(entry + 4)
    columns = tl.load(entry + 5)
    rank = tl.load(entry + 6).to(tl.int32)
    if aligned:
        weight = tl.multiple_of(weight, 16)
        source = tl.multiple_of(source, 16)
        down = tl.multiple_of(down, 16)
        columns = tl.multiple_of(columns, 16)

    across = (columns + tile - 1) // tile
    within = number - tl.load(first_tiles + low)
    row = (within // across) * tile + tl.arange(0, tile)
    column = (within % across) * tile + tl.arange(0, tile)
    inside = (row < out)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    total = tl.load(source + place, mask=inside, other=0.0).to(tl.float32)
    for first in range(0, rank, block_r):
        term = first + tl.arange(0, block_r)
        ups = tl.load(
            up + row[:, None] * rank + term[None, :], mask=(row < out)[:, None] & (term < rank)[None, :], other=0.0
        )
        downs = tl.load(
            down + term[:, None] * columns + column[None, :],
            mask=(term < rank)[:, None] & (column < columns)[None, :],
            other=0.0,
        )
        if widen:
            ups = ups.to(tl.float32)
            downs = downs.to(tl.float32)
        total = tl.dot(ups, downs, total, input_precision="ieee")
    tl.store(weight + place, total.to(some_weight.dtype.element_ty), mask=inside)


def lora_patch(layers: Sequence[PatchedLayer]) -> None:
    """Write the weights of all layers. Weights must not share memory, and nothing may read them meanwhile."""
    if not layers:
        return
    device = layers[0].weight.device
    fields, first_tiles = _table(layers)
    # Pinned memory, so that the calling thread does not wait for the device.
    on_device = [each.pin_memory() if device.type == "cuda" else each for each in (fields, first_tiles)]
    table, firsts = (each.to(device, non_blocking=True) for each in on_device)
    _patch[int(first_tiles[-1]),](
        *(table, firsts, layers[0].weight, len(layers)),
        fields=_FIELDS,
        halvings=len(layers).bit_length(),
        aligned=_aligned(fields),
        # Triton's interpreter would multiply the bits of bfloat16 as whole numbers.
        widen=device.type == "cpu",
        tile=_TILE,
        block_r=_RANK,
    )


def reference(layers: Sequence[PatchedLayer]) -> None:
    """Compute the same with torch, layer by layer."""
    for each in layers:
        if each.weight.dtype in {torch.float32, torch.float64}:
            torch.addmm(each.before, each.up, each.down, out=each.weight)
        else:
            each.weight.copy_(torch.addmm(each.before.float(), each.up.float(), each.down.float()))


def _table(layers: Sequence[PatchedLayer]) -> tuple[Tensor, Tensor]:
    """Return the layer table, int64 [layers, fields], and the first tile of each layer and the total, int32."""
    fields = torch.tensor(
        [
            (
                *(each.weight.data_ptr(), each.before.data_ptr(), each.up.data_ptr(), each.down.data_ptr()),
                *(*each.weight.shape, each.up.shape[1]),
            )
            for each in layers
        ],
        dtype=torch.int64,
    )
    tiles = [0]
    for each in layers:
        out, columns = each.weight.shape
        tiles.append(tiles[-1] + ceil_div(out, _TILE) * ceil_div(columns, _TILE))
    return fields, torch.tensor(tiles, dtype=torch.int32)


def _aligned(fields: Tensor) -> bool:
    return not bool((fields[:, [0, 1, 3, 5]] % _ALIGNMENT).any())


# SDXL's attention projections: number and size.
_SDXL = ((140, 640), (600, 1280))


def cases(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Sequence[Case]:
    """Return the cases of the bench; small ones for an interpreter."""
    sizes = ((2, 70), (1, 130)) if small else _SDXL
    return [_case(device, dtype, sizes, rank) for rank in (32, 128)]


def _case(device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, int]], rank: int) -> Case:
    generator = torch.Generator("cpu").manual_seed(rank)
    layers = [_layer(side, rank, generator, device, dtype) for count, side in sizes for _ in range(count)]
    exact = [layers[0].before.double() + layers[0].up.double() @ layers[0].down.double()]

    def run(write: Callable[[Sequence[PatchedLayer]], None]) -> list[Tensor]:
        write(layers)
        return [layers[0].weight]

    return Case(
        name=f"lora_patch {len(layers)} layers of rank {rank}",
        kernel=lambda: run(lora_patch),
        reference=lambda: run(reference),
        exact=lambda: exact,
        moved_bytes=sum(2 * each.weight.nbytes + each.up.nbytes + each.down.nbytes for each in layers),
        flops=sum(2 * each.weight.numel() * rank for each in layers),
    )


def _layer(side: int, rank: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> PatchedLayer:
    before, up, down = (
        (torch.randn(shape, generator=generator) / side).to(device, dtype)
        for shape in ((side, side), (side, rank), (rank, side))
    )
    return PatchedLayer(weight=torch.full_like(before, float("nan")), before=before, up=up, down=down)
