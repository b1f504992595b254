"""Masked tokens gathered and merged by kernels: bit for bit what torch moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
