"""Which tokens a map computes at each resolution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bottega.addons.edits.engine.masked.tokens import (
    MaskTokens,
    TokenCache,
    dilate,
    finest_stride,
    pack_rows,
    share,
)
from tests.samples.masked_networks import box, small_unet


@given(st.integers(1, 21), st.integers(1, 21), st.integers(0, 2**32 - 1))
def test_a_token_is_computed_where_an_element_under_it_is(height: int, width: int, seed: int) -> None:
    computed = torch.rand(height, width, generator=torch.Generator().manual_seed(seed)) < 0.1
    tokens = MaskTokens(computed)
    stride = 1
    while height > 1 or width > 1:
        stride, height, width = 2 * stride, (height + 1) // 2, (width + 1) // 2
        found = tokens.at(height, width)
        wanted = {(int(y) // stride, int(x) // stride) for y, x in computed.nonzero()}
        assert [(int(place) // width, int(place) % width) for place in found.index] == sorted(wanted)
        assert (found.count, found.total) == (len(wanted), height * width)


def test_a_size_that_no_level_has_is_refused() -> None:
    with pytest.raises(ValueError, match="no level of"):
        MaskTokens(box(0, 0, 2, 2)).at(5, 8)


def test_the_margin_goes_around_whole_tokens_of_the_finest_attention_level() -> None:
    grown = dilate(box(5, 6, 1, 1), 1, 2)
    assert torch.equal(grown, box(2, 4, 6, 6))
    assert torch.equal(dilate(box(5, 6, 1, 1), 0, 2), box(4, 6, 2, 2))
    assert share(grown, 2) == 9 / 64
    assert torch.equal(dilate(box(8, 0, 1, 1, size=(9, 5)), 1, 2), box(6, 0, 3, 4, size=(9, 5)))


def test_the_finest_attention_level_is_the_networks() -> None:
    assert finest_stride(small_unet()) == 2


def test_tokens_are_counted_once_for_a_map_and_forgotten_with_it() -> None:
    cache, computed = TokenCache(), box(0, 0, 3, 3)
    known = cache.of(computed)
    assert cache.of(computed) is known
    assert cache.of(computed.clone()) is not known
    assert known.at(8, 8) is known.at(8, 8)


def test_items_of_rows_lie_side_by_side_and_come_back_where_they_were() -> None:
    small, large = MaskTokens(box(0, 0, 3, 3)).at(8, 8), MaskTokens(box(4, 4, 9, 5)).at(8, 8)
    packing = pack_rows([small, None, large, small, small], 64, torch.device("cpu"))
    assert packing.layout.offsets == (0, 4, 68, 83, 87, 91)
    parts = [(part.first, part.last, part.count) for part in packing.layout.parts]
    assert parts == [(0, 1, 4), (1, 2, 64), (2, 3, 15), (3, 5, 4)]
    whole = torch.randn(5, 64, 3)
    items = packing.pack(whole)
    assert torch.equal(items[:4], whole[0, small.index])
    recorded = [torch.randn(64, 3).half() if row != 1 else None for row in range(5)]
    merged = packing.merge(items, recorded)
    for row, tokens in enumerate([small, None, large, small, small]):
        kept = recorded[row]
        expected = whole[row].clone() if kept is None else kept.float()
        if tokens is not None:
            expected[tokens.index] = whole[row, tokens.index]
        assert torch.equal(merged[row], expected)


def test_where_everything_is_computed_nothing_is_copied() -> None:
    packing = pack_rows([None, None], 64, torch.device("cpu"))
    whole = torch.randn(2, 64, 3)
    items = packing.pack(whole)
    assert items.data_ptr() == whole.data_ptr()
    assert packing.merge(items, [None, None]).data_ptr() == whole.data_ptr()
