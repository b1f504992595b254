"""What masked rows cost, learnt from turns: against turns that really cost what a law says."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.planning import RowFractions, StepTimes, rows_in

SHAPE, OTHER = (64, 64), (32, 32)


def times(seconds: Callable[[float], float]) -> StepTimes:
    return StepTimes.from_entries((SHAPE, rows, seconds(rows)) for rows in (1, 2, 4, 8, 16))


def gaining(rows: float) -> float:
    return 0.02 + 0.01 * rows


@given(fixed=st.floats(0, 1), shares=st.lists(st.floats(0.01, 0.95), min_size=1, max_size=4), plain=st.integers(1, 4))
def test_what_turns_cost_is_found_again(fixed: float, shares: list[float], plain: int) -> None:
    fractions, table = RowFractions(), times(gaining)
    cost = plain + sum(fixed + (1 - fixed) * share for share in shares)
    fractions.observe(table, SHAPE, rows=plain + len(shares), shares=shares, seconds=gaining(cost))
    for share in (0.05, 0.19, 0.6):
        assert fractions.fraction(SHAPE, share) == pytest.approx(max(0.02, fixed + (1 - fixed) * share), abs=1e-3)


def test_a_plain_row_costs_one_and_nothing_costs_more() -> None:
    fractions = RowFractions()
    assert fractions.fraction(SHAPE, 1.0) == 1.0
    fractions.observe(times(gaining), SHAPE, rows=4, shares=[0.1] * 4, seconds=9.0)
    assert fractions.fraction(SHAPE, 0.1) == 1.0


def test_new_turns_move_what_is_known_and_one_alone_does_not_turn_it() -> None:
    fractions, table = RowFractions(), times(gaining)
    for _ in range(30):
        fractions.observe(table, SHAPE, rows=4, shares=[0.2] * 4, seconds=gaining(4 * 0.4))
    learnt = fractions.fraction(SHAPE, 0.2)
    assert learnt == pytest.approx(0.4, abs=0.01)
    fractions.observe(table, SHAPE, rows=4, shares=[0.2] * 4, seconds=gaining(4.0))
    assert learnt < fractions.fraction(SHAPE, 0.2) < 0.6


def test_a_shape_that_never_ran_costs_as_the_last_one_that_did() -> None:
    fractions, table = RowFractions(), times(gaining)
    first = fractions.fraction(OTHER, 0.1)
    fractions.observe(table, SHAPE, rows=2, shares=[0.1, 0.1], seconds=gaining(1.8))
    assert fractions.fraction(OTHER, 0.1) == pytest.approx(0.9, abs=0.01) != first


def test_turns_that_say_nothing_change_nothing() -> None:
    fractions = RowFractions()
    before = fractions.fraction(SHAPE, 0.2)
    fractions.observe(StepTimes(), SHAPE, rows=2, shares=[0.2, 0.2], seconds=1.0)
    fractions.observe(times(gaining), SHAPE, rows=2, shares=[1.0, 1.0], seconds=0.001)
    fractions.observe(times(gaining), SHAPE, rows=2, shares=[], seconds=0.001)
    assert fractions.fraction(SHAPE, 0.2) == before


def test_of_many_shapes_the_one_that_ran_longest_ago_is_forgotten() -> None:
    fractions, table = RowFractions(), times(gaining)
    for side in range(8, 8 + 40):
        fractions.observe(table, (side, side), rows=2, shares=[0.1, 0.1], seconds=0.0)
    assert len(fractions._fixed) == 32
    assert (8, 8) not in fractions._fixed


@given(rows=st.floats(1.0, 16.0))
def test_rows_in_a_turn_are_found_again(rows: float) -> None:
    assert rows_in(times(gaining), SHAPE, gaining(rows), most=16) == pytest.approx(rows, abs=1e-3)
    assert rows_in(StepTimes(), SHAPE, 1.0, most=4) is None


def test_they_are_the_same_on_the_other_side_of_a_wire_but_for_what_is_none() -> None:
    fractions, table = RowFractions(), times(gaining)
    for shape in (SHAPE, OTHER):
        fractions.observe(table, shape, rows=4, shares=[0.2], seconds=0.055)
    entries = list(fractions.entries())
    assert [shape for shape, _ in entries] == [SHAPE, OTHER]
    wrong = [((8, 8), math.nan), ((9, 9), -0.1), ((7, 7), 1.1)]
    told = RowFractions.from_entries([*wrong, *entries])
    assert list(told.entries()) == entries
    assert told.fraction(SHAPE, 0.3) == fractions.fraction(SHAPE, 0.3)
