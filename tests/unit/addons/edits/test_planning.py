"""Which blocks take what was recorded: against every choice there is, and against deciding one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from random import Random
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.addons.edits.planning import (
    BlockCost,
    BlockValue,
    StepPlan,
    choose,
    follow,
    least_end_s,
    plan_steps,
)
from load.bench.edit_loading import decide_one_by_one
from tests.support.processor_speed import on_this_machine

# Equal ones are as likely as different ones: blocks of a network are alike.
_seconds = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 3.0]), st.floats(0.0, 4.0, allow_subnormal=False))
_loaded = st.builds(BlockCost, name=st.just(""), full_s=_seconds, masked_s=_seconds, load_s=_seconds)
_on_its_way = st.builds(BlockCost, name=st.just(""), full_s=_seconds, masked_s=_seconds, ready_s=_seconds)
_block = st.one_of(_loaded, _loaded, _on_its_way)
_busy = st.one_of(st.just(0.0), st.floats(-3.0, 12.0))
# At most 9 blocks in all: every choice of them is tried.
_few_steps = st.one_of(
    st.lists(st.lists(_block, max_size=3), max_size=3),
    st.lists(st.lists(_block, min_size=4, max_size=4), min_size=2, max_size=2),
)


def block(full_s: float, masked_s: float, load_s: float = 0.0, ready_s: float = 0.0) -> BlockCost:
    return BlockCost(name="", full_s=full_s, masked_s=masked_s, load_s=load_s, ready_s=ready_s)


def plan_step(blocks: Sequence[BlockCost], *, load_busy_s: float = 0.0) -> StepPlan:
    """The plan with which one step ends earliest."""
    return plan_steps([blocks], load_busy_s=load_busy_s, most_states=None)[0]


def network(rng: Random, loading: float, alike: bool, steps: int) -> list[list[BlockCost]]:
    """Steps of blocks as SDXL has them. loading: what all loads take, in what computing all takes."""
    kinds = [(0.0016, 0.0005, 1.0)] * 2 + [(0.0014, 0.0004, 0.5)] * 10 + [(0.003, 0.0007, 1.3)] * 2
    made = [[seconds * (1.0 if alike else rng.uniform(0.9, 1.1)) for seconds in kind] for kind in kinds * 10]
    unit_s = loading * sum(full_s for full_s, _, _ in made) / sum(load_s for _, _, load_s in made)
    return [[block(full_s, masked_s, load_s * unit_s) for full_s, masked_s, load_s in made]] * steps


def best_of_all(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> float:
    """When the last step ends, by trying every choice."""
    choices = product((False, True), repeat=sum(map(len, steps)))
    return min(follow(steps, takes, load_busy_s=load_busy_s)[-1].compute_s for takes in choices)


@settings(max_examples=80, deadline=None)
@given(steps=_few_steps.filter(bool), load_busy_s=_busy)
def test_no_choice_of_blocks_ends_before_the_plan_of_several_steps_nor_a_hundredth_before_the_engine_s(
    steps: list[list[BlockCost]], load_busy_s: float
) -> None:
    best_s = best_of_all(steps, load_busy_s)
    plans = plan_steps(steps, load_busy_s=load_busy_s, most_states=None)
    assert plans[-1].compute_s == pytest.approx(best_s)
    takes = [taken for plan in plans for taken in plan.takes]
    assert plans == follow(steps, takes, load_busy_s=load_busy_s)
    assert least_end_s(steps, load_busy_s=load_busy_s) <= best_s + 1e-9
    assert plan_steps(steps, load_busy_s=load_busy_s)[-1].compute_s <= best_s * 1.01 + 1e-9


@pytest.mark.parametrize("loading", [0.6, 2.0])
def test_an_exact_plan_of_more_blocks_ends_as_early_as_any(loading: float) -> None:
    blocks = network(Random(3), loading, alike=False, steps=1)[0][:50]
    states = {(0.0, 0.0)}
    for each in blocks:
        ends = [(load_s + each.load_s, compute_s) for load_s, compute_s in states]
        taken = {(load_s, max(compute_s, load_s) + each.masked_s) for load_s, compute_s in ends}
        made = taken | {(load_s, compute_s + each.full_s) for load_s, compute_s in states}
        states, least_s = set(), math.inf
        for load_s, compute_s in sorted(made):
            if compute_s < least_s:
                states.add((load_s, compute_s))
                least_s = compute_s
    assert plan_step(blocks).compute_s == pytest.approx(min(compute_s for _, compute_s in states))


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(st.lists(_block, max_size=20), min_size=1, max_size=4), load_busy_s=_busy)
def test_a_bounded_plan_is_never_worse_than_deciding_one_by_one(
    steps: list[list[BlockCost]], load_busy_s: float
) -> None:
    plans = plan_steps(steps, load_busy_s=load_busy_s, most_states=1)
    one_by_one = follow(steps, decide_one_by_one(steps, load_busy_s=load_busy_s), load_busy_s=load_busy_s)
    least_s = least_end_s(steps, load_busy_s=load_busy_s)
    assert least_s - 1e-9 <= plans[-1].compute_s <= one_by_one[-1].compute_s + 1e-9


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("loading", [0.2, 1.0, 4.0])
def test_a_bounded_plan_of_many_steps_is_near_the_least_that_is_possible(loading: float, alike: bool) -> None:
    steps = network(Random(7), loading, alike, steps=10)
    assert plan_steps(steps)[-1].compute_s <= 1.005 * least_end_s(steps)


def test_what_is_here_does_not_wait_for_the_load_stream_and_what_is_on_its_way_waits_until_it_comes() -> None:
    plan = plan_step([block(1.0, 0.2), block(1.0, 0.2, ready_s=0.5), block(1.0, 0.2, ready_s=9.0)], load_busy_s=50.0)
    assert plan.takes == (True, True, False)
    assert plan.waits_s == pytest.approx((0.0, 0.3, 0.0))
    assert plan.compute_s == pytest.approx(0.2 + 0.3 + 0.2 + 1.0)
    assert plan.load_s == 50.0


def test_nothing_to_plan_is_planned() -> None:
    assert plan_steps([]) == []
    assert plan_step([], load_busy_s=2.0).compute_s == 0.0
    assert [plan.takes for plan in plan_steps([[], [block(1.0, 0.5)], []])] == [(), (True,), ()]


def test_ten_steps_of_140_blocks_are_planned_in_milliseconds() -> None:
    steps = network(Random(3), 1.0, alike=False, steps=10)
    assert sum(map(len, steps)) == 1400
    took_s = []
    for number in range(5):
        drifted = [[replace(each, load_s=each.load_s * (1 + number / 100)) for each in blocks] for blocks in steps]
        began_s = process_time()
        plan_steps(drifted)
        took_s.append(process_time() - began_s)
    assert min(took_s) < on_this_machine(0.03)  # 2 to 6 ms on two cores of 2020


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


def test_one_that_saves_most_is_not_lost_to_a_dense_crumb() -> None:
    assert choose([value("crumb", 0.2, 1), value("large", 10.0, 100)], 100) == {"large"}
