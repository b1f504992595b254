"""Which blocks take what was recorded: against every choice there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.planning import BlockCost, least_end_s, plan_step, plan_steps
from bottega.planning.block_loading import follow

# Equal ones are as likely as different ones: blocks of a network are alike.
_seconds = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 3.0]), st.floats(0.0, 4.0, allow_subnormal=False))
_loaded = st.builds(lambda full_s, masked_s, load_s: (full_s, masked_s, load_s, 0.0), _seconds, _seconds, _seconds)
_on_its_way = st.builds(lambda full_s, masked_s, ready_s: (full_s, masked_s, 0.0, ready_s), *[_seconds] * 3)
_block = st.one_of(_loaded, _loaded, _on_its_way).map(
    lambda costs: BlockCost(name="", full_s=costs[0], masked_s=costs[1], load_s=costs[2], ready_s=costs[3])
)
_busy = st.one_of(st.just(0.0), st.floats(-3.0, 12.0))


def best_of_all(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> float:
    """By trying every choice."""
    choices = product((False, True), repeat=sum(map(len, steps)))
    return min(follow(steps, takes, load_busy_s=load_busy_s)[-1].compute_s for takes in choices)


@settings(max_examples=60, deadline=None)
@given(blocks=st.lists(_block, min_size=1, max_size=12), load_busy_s=_busy)
def test_no_choice_of_blocks_ends_before_the_plan_of_a_step(blocks: list[BlockCost], load_busy_s: float) -> None:
    plan = plan_step(blocks, load_busy_s=load_busy_s)
    assert plan.compute_s == pytest.approx(best_of_all([blocks], load_busy_s))
    assert plan == follow([blocks], plan.takes, load_busy_s=load_busy_s)[0]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.lists(_block, min_size=1, max_size=4), min_size=2, max_size=3),
    load_busy_s=_busy,
)
def test_no_choice_of_blocks_ends_before_the_plan_of_several_steps(
    steps: list[list[BlockCost]], load_busy_s: float
) -> None:
    plans = plan_steps(steps, load_busy_s=load_busy_s, most_states=None)
    best_s = best_of_all(steps, load_busy_s)
    assert plans[-1].compute_s == pytest.approx(best_s)
    assert least_end_s(steps, load_busy_s=load_busy_s) <= best_s + 1e-9
