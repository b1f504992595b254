"""Gathers the computed tokens of masked rows, and merges them with the recorded tokens.

Gathering reads tokens of any strides, where torch first copies all of them. Merging writes every token once, in one
launch for up to eight rows; torch writes the recorded tokens row by row, and then the computed ones over them.

Shapes: whole [rows, tokens, channels]; items [items, channels]; index int64 [items], places among rows * tokens; slots
int32 [rows * tokens], the item of each place, -1 if it is not computed. Values are moved bit for bit if dtypes are
equal, else rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from bottega.kernels.kernel import Case, ceil_div, jit, power_of_two

_ITEMS, _CHANNELS = 16, 128
# Rows per launch, whose addresses are arguments.
_ROWS = 8


@jit
def _gather(
    whole: tl.tensor,
    index: tl.tensor,
    items: tl.tensor,
    stride_row: tl.tensor,
    stride_token: tl.tensor,
    stride_channel: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    block_i: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    item = tl.program_id(0) * block_i + tl.arange(0, block_i)
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    place = tl.load(index + item, mask=item < count, other=0)
    inside = (item < count)[:, None] & (channel < channels)[None, :]
    first = (place // tokens) * stride_row + (place % tokens) * stride_token
    values = tl.load(whole + first[:, None] + (channel * stride_channel)[None, :], mask=inside, other=0.0)
    tl.store(items + item.to(tl.int64)[:, None] * channels + channel[None, :], values, mask=inside)


@jit
def _merge(
    items: tl.tensor,
    slots: tl.tensor,
    whole: tl.tensor,
    some_rest: tl.tensor,
    rest_0: tl.tensor,
    rest_1: tl.tensor,
    rest_2: tl.tensor,
    rest_3: tl.tensor,
    rest_4: tl.tensor,
    rest_5: tl.tensor,
    rest_6: tl.tensor,
    rest_7: tl.tensor,
    tokens: tl.tensor,
    channels: tl.tensor,
    block_i: tl.constexpr,
    block_c: tl.constexpr,
) -> None:
    row = tl.program_id(2)
    address = tl.where(row == 1, rest_1, rest_0)
    address = tl.where(row == 2, rest_2, address)
    address = tl.where(row == 3, rest_3, address)
    address = tl.where(row == 4, rest_4, address)
    address = tl.where(row == 5, rest_5, address)
    address = tl.where(row == 6, rest_6, address)
    address = tl.where(row == 7, rest_7, address)
    rest = address.to(some_rest.dtype)
    token = tl.program_id(0) * block_i + tl.arange(0, block_i)
    channel = tl.program_id(1) * block_c + tl.arange(0, block_c)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    place = row.to(tl.int64) * tokens + token
    slot = tl.load(slots + place, mask=token < tokens, other=0)
    computed = (slot >= 0)[:, None]
    made = tl.load(
        items + slot.to(tl.int64)[:, None] * channels + channel[None, :], mask=inside & computed, other=0.0
    ).to(tl.float32)
    recorded = tl.load(
        rest + token.to(tl.int64)[:, None] * channels + channel[None, :], mask=inside & (slot < 0)[:, None], other=0.0
    ).to(tl.float32)
    tl.store(whole + place[:, None] * channels + channel[None, :], tl.where(computed, made, recorded), mask=inside)


def gather_tokens(whole: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return the items of a whole tensor, contiguous, or write them to a contiguous `out`."""
    _, tokens, channels = whole.shape
    items = whole.new_empty(len(index), channels) if out is None else out
    if items.numel():
        block_c = min(_CHANNELS, power_of_two(channels))
        _gather[ceil_div(len(index), _ITEMS), ceil_div(channels, block_c)](
            *(whole, index, items, *whole.stride(), len(index), tokens, channels), block_i=_ITEMS, block_c=block_c
        )
    return items


def merge_tokens(
    items: Tensor, slots: Tensor, recorded: Sequence[Tensor | None], tokens: int, *, out: Tensor | None = None
) -> Tensor:
    """Return the whole tensor, contiguous, or write it to a contiguous `out`.

    `items` and the recorded tensors are contiguous. `recorded` is by row, [tokens, channels] of one dtype and on the
    items' device, or None for rows that are computed whole; at least one row has some.
    """
    rows, channels = len(recorded), items.shape[-1]
    whole = items.new_empty(rows, tokens, channels) if out is None else out
    some = next(each for each in recorded if each is not None)
    block_c = min(_CHANNELS, power_of_two(channels))
    for first in range(0, rows, _ROWS):
        group = recorded[first : first + _ROWS]
        # Nothing is read at the address of a row without recorded tokens.
        addresses = [(some if each is None else each).data_ptr() for each in group]
        addresses += [some.data_ptr()] * (_ROWS - len(group))
        part = slots[first * tokens : (first + len(group)) * tokens]
        _merge[ceil_div(tokens, _ITEMS), ceil_div(channels, block_c), len(group)](
            *(items, part, whole[first : first + len(group)], some, *addresses, tokens, channels),
            block_i=_ITEMS,
            block_c=block_c,
        )
    return whole


def slots_of(index: Tensor, places: int) -> Tensor:
    """Return the item of each place, int32 [places], or -1 if it has none."""
    slots = torch.full((places,), -1, dtype=torch.int32, device=index.device)
    slots[index] = torch.arange(len(index), dtype=torch.int32, device=index.device)
    return slots


def gather_reference(whole: Tensor, index: Tensor) -> Tensor:
    """Gather with torch."""
    return whole.reshape(-1, whole.shape[-1]).index_select(0, index)


def merge_reference(items: Tensor, index: Tensor, recorded: Sequence[Tensor | None], tokens: int) -> Tensor:
    """Merge with torch."""
    whole = items.new_empty(len(recorded), tokens, items.shape[-1])
    for row, rest in zip(whole, recorded, strict=True):
        if rest is not None:
            row.copy_(rest)
    whole.view(-1, items.shape[-1]).index_copy_(0, index, items)
    return whole


# SDXL's levels at 1024 x 1024, for both halves of guidance; a fifth of the picture is computed.
_SDXL = ((4096, 640), (1024, 1280))


def cases(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Sequence[Case]:
    """Return the cases of the bench; small ones for an interpreter."""
    made: list[Case] = []
    for tokens, channels in ((40, 24),) if small else _SDXL:
        made += _cases(device, dtype, tokens, channels)
    return made


def _cases(device: torch.device, dtype: torch.dtype, tokens: int, channels: int) -> Sequence[Case]:
    generator = torch.Generator("cpu").manual_seed(tokens)
    # Strided like a feature map's tokens: channels are not adjacent.
    whole = torch.randn(2, channels, tokens, generator=generator).to(device, dtype).transpose(1, 2)
    index = torch.randperm(2 * tokens, generator=generator)[: 2 * tokens // 5].sort().values.to(device)
    items = gather_reference(whole, index)
    recorded = [torch.randn(tokens, channels, generator=generator).to(device, torch.float16) for _ in range(2)]
    slots = slots_of(index, 2 * tokens)
    merged = 2 * tokens * channels
    return [
        Case(
            name=f"gather_tokens {tokens} x {channels}",
            kernel=lambda: [gather_tokens(whole, index)],
            reference=lambda: [gather_reference(whole, index)],
            exact=lambda: [gather_reference(whole, index)],
            moved_bytes=2 * items.nbytes + index.nbytes,
        ),
        Case(
            name=f"merge_tokens {tokens} x {channels}",
            kernel=lambda: [merge_tokens(items, slots, recorded, tokens)],
            reference=lambda: [merge_reference(items, index, recorded, tokens)],
            exact=lambda: [merge_reference(items, index, recorded, tokens)],
            moved_bytes=2 * items.nbytes + (merged - items.numel()) * 2 + (merged - items.numel()) * items.itemsize,
        ),
    ]
