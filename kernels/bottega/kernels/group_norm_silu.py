"""GroupNorm, optionally followed by SiLU, over feature maps of any strides, optimized for channels-last.

Two launches: the first computes mean and sum of squares of each group in each part of a map; the second reads the map
again and normalizes it. torch's own kernel copies a channels-last map to a contiguous one, writes a contiguous result,
and SiLU reads and writes it once more.

Shapes: x [rows, channels, height, width] in float32, float16 or bfloat16; weight and bias [channels]. Statistics are
summed in float32 around each part's own mean, so that large means cost no precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from bottega.kernels.kernel import Case, ceil_div, jit, power_of_two

# Elements of a tile: 16 KiB in half precision; a multiprocessor holds several tiles.
_TILE = 8192
# Channels of a tile: many in a channels-last map, where they are adjacent in memory; few in others.
_CHANNELS, _CHANNELS_APART = 128, 16
# Programs of the first launch: several for each multiprocessor of a large device. The second launch reads the
# statistics of all parts of a map, so their number is bounded.
_PROGRAMS, _MOST_PARTS = 512, 64
# Offsets within one row have 32 bits.
_MOST_ELEMENTS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How a feature map is divided into tiles and parts."""

    groups: int
    """Groups per tile."""
    channels: int
    """Channels per tile, rounded up so that all channels of its groups fit."""
    places: int
    """Pixels per tile."""
    part: int
    """Pixels per part."""
    parts: int


@jit
def _offsets(
    places: tl.tensor, width: tl.tensor, stride_h: tl.tensor, stride_w: tl.tensor, joined: tl.constexpr
) -> tl.tensor:
    """Return the memory offsets of pixels in row-major order. If `joined`, the map's rows are adjacent in memory."""
    if joined:
        return places * stride_w
    else:  # noqa: RET505 - Triton chooses the branch when it compiles
        return (places // width) * stride_h + (places % width) * stride_w


@jit
def _sum_parts(
    x: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    stride_n: tl.tensor,
    stride_c: tl.tensor,
    stride_h: tl.tensor,
    stride_w: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    channels: tl.tensor,
    groups: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    joined: tl.constexpr,
    each: tl.constexpr,
    groups_at_once: tl.constexpr,
    block_g: tl.constexpr,
    block_c: tl.constexpr,
    block_s: tl.constexpr,
) -> None:
    number, row = tl.program_id(0), tl.program_id(2)
    first_group = tl.program_id(1) * groups_at_once
    lane = tl.arange(0, block_c)
    channel = first_group * each + lane
    held = (lane < groups_at_once * each) & (channel < channels)
    columns = x + row.to(tl.int64) * stride_n + channel * stride_c
    begin = number * part
    end = tl.minimum(begin + part, places)

    place = begin + tl.arange(0, block_s)
    offset = _offsets(place, width, stride_h, stride_w, joined)
    inside = (place < end)[:, None] & held[None, :]
    tile = tl.load(columns[None, :] + offset[:, None], mask=inside, other=0.0).to(tl.float32)
    near = tl.sum(tile, axis=0) / tl.minimum(end - begin, block_s).to(tl.float32)

    total = tl.zeros([block_c], dtype=tl.float32)
    total_squares = tl.zeros([block_c], dtype=tl.float32)
    for first in range(begin, end, block_s):
        place = first + tl.arange(0, block_s)
        offset = _offsets(place, width, stride_h, stride_w, joined)
        inside = (place < end)[:, None] & held[None, :]
        tile = tl.load(columns[None, :] + offset[:, None], mask=inside, other=0.0).to(tl.float32)
        apart = tl.where(inside, tile - near[None, :], 0.0)
        total += tl.sum(apart, axis=0)
        total_squares += tl.sum(apart * apart, axis=0)

    count = (end - begin).to(tl.float32)
    mean = near + total / count
    around_mean = total_squares - total * total / count
    # Combine the channels of each group: sums around the channels' means, and differences between those means.
    group = tl.arange(0, block_g)
    member = ((lane // each)[None, :] == group[:, None]) & held[None, :]
    group_mean = tl.sum(tl.where(member, mean[None, :], 0.0), axis=1) / each
    between = mean - tl.sum(tl.where(member, group_mean[:, None], 0.0), axis=0)
    group_squares = tl.sum(tl.where(member, (around_mean + count * between * between)[None, :], 0.0), axis=1)
    wanted = (group < groups_at_once) & (first_group + group < groups)
    at = (row * parts + number) * groups + first_group + group
    tl.store(means + at, group_mean, mask=wanted)
    tl.store(squares + at, group_squares, mask=wanted)


@jit
def _normalize(
    x: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    means: tl.tensor,
    squares: tl.tensor,
    stride_n: tl.tensor,
    stride_c: tl.tensor,
    stride_h: tl.tensor,
    stride_w: tl.tensor,
    out_n: tl.tensor,
    out_c: tl.tensor,
    out_h: tl.tensor,
    out_w: tl.tensor,
    width: tl.tensor,
    places: tl.tensor,
    channels: tl.tensor,
    groups: tl.tensor,
    part: tl.tensor,
    parts: tl.tensor,
    eps: tl.tensor,
    activate: tl.constexpr,
    joined: tl.constexpr,
    out_joined: tl.constexpr,
    each: tl.constexpr,
    groups_at_once: tl.constexpr,
    block_g: tl.constexpr,
    block_c: tl.constexpr,
    block_s: tl.constexpr,
    block_p: tl.constexpr,
) -> None:
    row = tl.program_id(2)
    first_group = tl.program_id(1) * groups_at_once
    lane = tl.arange(0, block_c)
    channel = first_group * each + lane
    held = (lane < groups_at_once * each) & (channel < channels)

    # Combine the parts of each group, around their common mean.
    group = tl.arange(0, block_g)
    number = tl.arange(0, block_p)
    wanted = (number < parts)[:, None] & ((group < groups_at_once) & (first_group + group < groups))[None, :]
    at = (row * parts + number)[:, None] * groups + (first_group + group)[None, :]
    part_means = tl.load(means + at, mask=wanted, other=0.0)
    part_squares = tl.load(squares + at, mask=wanted, other=0.0)
    counts = tl.maximum(tl.minimum(places - number * part, part), 0).to(tl.float32)[:, None]
    total = tl.cast(places, tl.float32)  # Not `to`: Triton compiles an argument of 1 in as a plain number.
    mean = tl.sum(part_means * counts, axis=0) / total
    between = part_means - mean[None, :]
    variance = tl.sum(part_squares + counts * each * between * between, axis=0) / (total * each)
    inverse = 1.0 / tl.sqrt(variance + eps)

    member = ((lane // each)[None, :] == group[:, None]) & held[None, :]
    channel_mean = tl.sum(tl.where(member, mean[:, None], 0.0), axis=0)
    scale = tl.sum(tl.where(member, inverse[:, None], 0.0), axis=0)
    scale *= tl.load(weight + channel, mask=held, other=0.0).to(tl.float32)
    shift = tl.load(bias + channel, mask=held, other=0.0).to(tl.float32)

    place = tl.program_id(0) * block_s + tl.arange(0, block_s)
    inside = (place < places)[:, None] & held[None, :]
    columns = x + row.to(tl.int64) * stride_n + channel * stride_c
    offset = _offsets(place, width, stride_h, stride_w, joined)
    tile = tl.load(columns[None, :] + offset[:, None], mask=inside, other=0.0).to(tl.float32)
    made = (tile - channel_mean[None, :]) * scale[None, :] + shift[None, :]
    if activate:
        made = made / (1.0 + tl.exp(-made))
    columns = out + row.to(tl.int64) * out_n + channel * out_c
    offset = _offsets(place, width, out_h, out_w, out_joined)
    tl.store(columns[None, :] + offset[:, None], made, mask=inside)


def group_norm_silu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    groups: int,
    eps: float,
    activate: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Return SiLU of the GroupNorm, or only the norm, in the layout of `x`, or in `out` if given."""
    rows, channels, height, width = x.shape
    if x.numel() == 0 or max(_extent(x), 0 if out is None else _extent(out)) >= _MOST_ELEMENTS:
        made = reference(x, weight, bias, groups=groups, eps=eps, activate=activate)
        return made if out is None else out.copy_(made)
    out = torch.empty_like(x) if out is None else out
    plan = _plan(x, groups)
    each = channels // groups
    blocks = ceil_div(groups, plan.groups)
    means, squares = torch.empty(2, rows, plan.parts, groups, device=x.device, dtype=torch.float32)
    sizes = (width, height * width, channels, groups, plan.part, plan.parts)
    shape = {
        "each": each,
        "groups_at_once": plan.groups,
        "block_g": power_of_two(plan.groups),
        "block_c": plan.channels,
        "block_s": plan.places,
    }
    _sum_parts[plan.parts, blocks, rows](x, means, squares, *x.stride(), *sizes, joined=_joined(x), **shape)
    _normalize[ceil_div(height * width, plan.places), blocks, rows](
        *(x, out, weight, bias, means, squares, *x.stride(), *out.stride(), *sizes, eps),
        activate=activate,
        joined=_joined(x),
        out_joined=_joined(out),
        block_p=_MOST_PARTS,
        **shape,
    )
    return out


def reference(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int, eps: float, activate: bool = True) -> Tensor:
    """Compute the same result with torch."""
    normed = functional.group_norm(x, groups, weight, bias, eps)
    return functional.silu(normed) if activate else normed


def _plan(x: Tensor, groups: int) -> _Cut:
    rows, channels, height, width = x.shape
    each = channels // groups
    at_once = min(groups, max(1, (_CHANNELS if x.stride(1) == 1 else _CHANNELS_APART) // each))
    lanes = power_of_two(at_once * each)
    places = min(max(1, _TILE // lanes), power_of_two(height * width))
    parts = min(_MOST_PARTS, ceil_div(height * width, places), ceil_div(_PROGRAMS, rows * ceil_div(groups, at_once)))
    part = ceil_div(ceil_div(height * width, parts), places) * places
    return _Cut(groups=at_once, channels=lanes, places=places, part=part, parts=ceil_div(height * width, part))


def _joined(x: Tensor) -> bool:
    """Return whether the map's rows are adjacent in memory."""
    return x.shape[2] == 1 or x.stride(2) == x.shape[3] * x.stride(3)


def _extent(x: Tensor) -> int:
    return 1 + sum((length - 1) * stride for length, stride in zip(x.shape[1:], x.stride()[1:], strict=True))


# SDXL's maps at 1024 x 1024: channels and side.
_SDXL = ((320, 128), (640, 64), (960, 128), (1280, 32), (1920, 64), (2560, 32))


def cases(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Sequence[Case]:
    """Return the cases of the bench; small ones for an interpreter."""
    return [_case(device, dtype, channels, 8 if small else side) for channels, side in (_SDXL[:1] if small else _SDXL)]


def _case(device: torch.device, dtype: torch.dtype, channels: int, side: int) -> Case:
    generator = torch.Generator("cpu").manual_seed(channels)
    x = torch.randn(2, channels, side, side, generator=generator).to(device, dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight, bias = (torch.randn(channels, generator=generator).to(device, dtype) for _ in range(2))
    return Case(
        name=f"group_norm_silu {channels} x {side} x {side}",
        kernel=lambda: [group_norm_silu(x, weight, bias, groups=32, eps=1e-5)],
        reference=lambda: [reference(x, weight, bias, groups=32, eps=1e-5)],
        exact=lambda: [reference(x.double(), weight.double(), bias.double(), groups=32, eps=1e-5)],
        moved_bytes=3 * x.nbytes,
        flops=12 * x.numel(),
    )
