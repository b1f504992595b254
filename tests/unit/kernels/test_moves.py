"""Masked tokens and tiles of feature maps moved by kernels: bit for bit what torch moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bottega.kernels.tile_moves import corners_of, cut_reference, cut_tiles, paste_reference, paste_tiles
from bottega.kernels.token_moves import gather_reference, gather_tokens, merge_reference, merge_tokens, slots_of
from tests.support.poisoned import Poisoned

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "as a feature map has it": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of more tokens": lambda x: torch.cat([x, x, x], dim=1)[:, x.shape[1] : 2 * x.shape[1]],
}


def some_places(rows: int, tokens: int, share: float = 0.4) -> Tensor:
    generator = torch.Generator().manual_seed(rows * tokens)
    count = max(1, int(rows * tokens * share))
    return torch.randperm(rows * tokens, generator=generator)[:count].sort().values


def random_tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 7, 5), (3, 33, 130)], ids=str)
def test_items_are_the_tokens_at_their_places(shape: tuple[int, int, int], layout: str) -> None:
    whole, index = LAYOUTS[layout](random_tokens(*shape)), some_places(*shape[:2])
    out = Poisoned((len(index), shape[2]))
    gather_tokens(whole, index, out=out.tensor)
    out.check()
    assert torch.equal(out.tensor, gather_reference(whole, index))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, torch.float16), (torch.float16, torch.float16), (torch.bfloat16, torch.bfloat16)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 3, 1), (2, 17, 5), (9, 5, 130)], ids=str)
def test_a_merged_whole_has_items_at_their_places_and_what_was_recorded_elsewhere(
    shape: tuple[int, int, int], dtype: torch.dtype, kept: torch.dtype
) -> None:
    """Nine rows are two launches."""
    rows, tokens, channels = shape
    index = some_places(rows, tokens)
    items = random_tokens(len(index), channels, dtype=dtype)
    recorded: list[Tensor | None] = [random_tokens(tokens, channels, dtype=kept) + row for row in range(rows)]
    out = Poisoned(shape, dtype)
    merge_tokens(items, slots_of(index, rows * tokens), recorded, tokens, out=out.tensor)
    out.check()
    assert torch.equal(out.tensor, merge_reference(items, index, recorded, tokens))


def test_rows_that_are_computed_whole_have_nothing_recorded() -> None:
    tokens = 6
    index = torch.cat([torch.arange(6), torch.tensor([8, 9]), torch.arange(12, 18)])
    items = random_tokens(len(index), 3)
    recorded = [None, random_tokens(tokens, 3), None]
    made = merge_tokens(items, slots_of(index, 18), recorded, tokens)
    assert torch.equal(made, merge_reference(items, index, recorded, tokens))


def test_no_places_are_no_items() -> None:
    assert gather_tokens(random_tokens(2, 3, 4), torch.empty(0, dtype=torch.int64)).shape == (0, 4)


CPU = torch.device("cpu")
# row, top, left: inside, beyond each border, and wholly beyond one.
PLACES = [(0, 0, 0), (1, 3, 2), (0, -2, -1), (1, 5, 6), (1, -1, 4), (0, 2, -3)]
SHAPES = [(1, 1), (3, 5), (4, 2)]


def maps(channels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, channels, 7, 9, generator=torch.Generator().manual_seed(channels)).to(dtype)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channels", [1, 5, 130])
def test_a_tile_is_what_lies_there_and_zeros_beyond_the_picture(
    channels: int, shape: tuple[int, int], channels_last: bool
) -> None:
    whole = maps(channels)
    whole = whole.contiguous(memory_format=torch.channels_last) if channels_last else whole[:, :, :, ::1]
    out = Poisoned((len(PLACES), channels, *shape), channels_last=channels_last)
    cut_tiles(whole, corners_of(PLACES, CPU), out.tensor)
    out.check()
    assert torch.equal(out.tensor, cut_reference(whole, PLACES, shape))


def test_a_tile_may_be_cut_into_some_channels_of_others_out_of_every_second_element() -> None:
    whole = maps(4).repeat_interleave(2, dim=3)[..., ::2]
    joined = torch.full((len(PLACES), 7, 3, 5), float("nan"))
    cut_tiles(whole, corners_of(PLACES, CPU), joined[:, 2:6])
    assert torch.equal(joined[:, 2:6], cut_reference(whole, PLACES, (3, 5)))
    assert joined[:, :2].isnan().all()
    assert joined[:, 6:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
def test_pasted_tiles_change_their_places_alone(dtype: torch.dtype, channels_last: bool) -> None:
    places = [(0, 0, 0), (1, 4, 4), (0, 3, 2)]
    ours = maps(6, dtype)
    tiles = torch.randn(3, 6, 3, 5, generator=torch.Generator().manual_seed(3)).to(dtype)
    if channels_last:
        ours = ours.contiguous(memory_format=torch.channels_last)
    theirs = ours.clone()
    paste_tiles(ours, corners_of(places, CPU), tiles)
    paste_reference(theirs, places, tiles)
    assert torch.equal(ours, theirs)


def test_what_of_a_tile_lies_beyond_the_picture_is_pasted_nowhere() -> None:
    whole = Poisoned((1, 2, 4, 4))
    whole.tensor.zero_()
    paste_tiles(whole.tensor, corners_of([(0, -1, -1), (0, 3, 3)], CPU), torch.ones(2, 2, 2, 2))
    whole.check()
    assert whole.tensor.sum() == 4
    assert whole.tensor[0, :, [0, 3], [0, 3]].eq(1).all()
