"""Which blocks are recorded under a budget: against every set of blocks there is."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from bottega.addons.edits.planning.template_blocks import BlockValue, choose

_values = st.lists(st.tuples(st.floats(-1.0, 5.0), st.integers(0, 12)), max_size=9).map(
    lambda pairs: [
        BlockValue(name=f"block {place}", saved_s=saved_s, size_bytes=size_bytes)
        for place, (saved_s, size_bytes) in enumerate(pairs)
    ]
)


def value(name: str, saved_s: float, size_bytes: int) -> BlockValue:
    return BlockValue(name=name, saved_s=saved_s, size_bytes=size_bytes)


def saved(blocks: list[BlockValue], names: frozenset[str]) -> float:
    return sum(block.saved_s for block in blocks if block.name in names)


@given(blocks=_values, budget_bytes=st.integers(0, 40))
def test_what_is_chosen_fits_and_saves_at_least_half_of_what_is_possible(
    blocks: list[BlockValue], budget_bytes: int
) -> None:
    chosen = choose(blocks, budget_bytes)
    assert sum(block.size_bytes for block in blocks if block.name in chosen) <= budget_bytes
    sets = (each for count in range(len(blocks) + 1) for each in combinations(blocks, count))
    best_s = max(
        sum(block.saved_s for block in each) for each in sets if sum(b.size_bytes for b in each) <= budget_bytes
    )
    assert saved(blocks, chosen) >= best_s / 2


@given(blocks=_values)
def test_without_a_bound_all_that_saves_anything_is_recorded(blocks: list[BlockValue]) -> None:
    assert choose(blocks, None) == {block.name for block in blocks if block.saved_s > 0.0}


def test_the_most_seconds_per_byte_come_first() -> None:
    blocks = [value("large", 3.0, 10), value("dense", 2.0, 4), value("small", 1.0, 3)]
    assert choose(blocks, 7) == {"dense", "small"}
    assert choose(blocks, 13) == {"dense", "small"}


def test_what_has_no_room_leaves_it_to_those_behind_it() -> None:
    assert choose([value("first", 5.0, 5), value("second", 4.0, 6), value("third", 1.0, 2)], 8) == {"first", "third"}


def test_one_that_saves_most_is_not_lost_to_a_dense_crumb() -> None:
    assert choose([value("crumb", 0.2, 1), value("large", 10.0, 100)], 100) == {"large"}
