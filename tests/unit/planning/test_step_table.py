"""The table of planned steps that workers report: against the law by which its points were made."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.planning import StepTable
from bottega.planning.cost import MAX_SHAPES
from bottega.planning.width import MAX_POINTS

SHAPE = (64, 64)


def table(*points: tuple[float, float]) -> StepTable:
    return StepTable.from_entries((SHAPE, rows, seconds) for rows, seconds in points)


def bent(rows: float) -> float:
    """Flat until a batch fills the machine, then in proportion."""
    return max(0.05, 0.02 * rows)


def test_between_points_it_goes_straight_and_beyond_the_last_it_goes_on() -> None:
    known = table((1.0, 0.1), (3.0, 0.2), (4.0, 0.4))
    assert known.seconds(SHAPE, 2.0) == pytest.approx(0.15)
    assert known.seconds(SHAPE, 3.0) == pytest.approx(0.2)
    assert known.seconds(SHAPE, 6.0) == pytest.approx(0.8)
    assert known.seconds(SHAPE, 0.5) == pytest.approx(0.075)
    assert known.seconds(SHAPE, 0.0) == 0.0
    assert known.seconds((32, 32), 2.0) is None
    assert table((2.0, 0.2)).seconds(SHAPE, 4.0) == pytest.approx(0.4), "of one point in proportion"


def test_of_about_as_many_rows_the_later_plan_counts() -> None:
    known = table((1.0, 0.1), (2.0, 0.9), (3.0, 0.3), (2.1, 0.21))
    assert list(known.entries()) == [(SHAPE, 1.0, 0.1), (SHAPE, 2.1, 0.21), (SHAPE, 3.0, 0.3)]


@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_what_was_planned_while_loads_were_slow_is_forgotten(seed: int) -> None:
    chance, known = Random(seed), StepTable()
    for notes, slower in ((40, 5.0), (300, 1.0)):
        for _ in range(notes):
            rows = chance.uniform(0.5, 20.0)
            known.note(SHAPE, rows, slower * bent(rows))
    assert all(seconds == bent(rows) for _, rows, seconds in known.entries())


def test_what_says_nothing_is_left_out() -> None:
    for nothing in (0.0, -1.0, math.nan, math.inf):
        assert list(table((nothing, 1.0), (1.0, nothing)).entries()) == []
    assert list(StepTable.from_entries([((0, 64), 1.0, 1.0)]).entries()) == []


@settings(max_examples=25)
@given(seed=st.integers(0, 1000))
def test_of_many_points_those_are_kept_that_say_most(seed: int) -> None:
    rows = [count / 2 for count in range(1, 41)]
    Random(seed).shuffle(rows)
    known = table(*((count, bent(count)) for count in rows))
    assert len(list(known.entries())) <= MAX_POINTS
    for count in (1.0, 2.0, 7.3, 15.0, 20.0):
        assert known.seconds(SHAPE, count) == pytest.approx(bent(count), rel=0.1)


def test_of_many_shapes_the_one_that_was_planned_longest_ago_is_forgotten() -> None:
    known = StepTable()
    for side in range(8, 8 + MAX_SHAPES):
        known.note((side, side), 1.0, 0.1)
    known.note((8, 8), 2.0, 0.2)
    known.note(SHAPE, 1.0, 0.1)
    assert known.seconds((8, 8), 1.0) is not None
    assert known.seconds((9, 9), 1.0) is None


@given(points=st.dictionaries(st.floats(0.01, 64.0), st.floats(1e-3, 10.0), min_size=1, max_size=30))
def test_the_wire_changes_nothing(points: dict[float, float]) -> None:
    sent = table(*points.items())
    received = StepTable.from_entries(sent.entries())
    assert list(received.entries()) == list(sent.entries())
