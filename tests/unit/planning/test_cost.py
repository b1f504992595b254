"""What a turn is expected to cost: from turns that ran to those that have not, on both sides of a wire."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.planning import RowFractions, Shape, StepTimes
from bottega.planning.cost import MAX_SHAPES, OUTDATED_TURNS, TRIAL_PAUSE_TURNS

SMALL, LARGE = (16, 16), (32, 32)

_shapes = st.sampled_from([(8, 8), (16, 16), (16, 24), (32, 32), (64, 64)])
_entries = st.dictionaries(st.tuples(_shapes, st.integers(1, 32)), st.floats(1e-4, 10.0), min_size=1, max_size=12).map(
    lambda table: [(shape, rows, seconds) for (shape, rows), seconds in table.items()]
)
SHAPE, OTHER = (64, 64), (32, 32)


def _times(*entries: tuple[Shape, int, float]) -> StepTimes:
    return StepTimes.from_entries(entries)


def _seconds(times: StepTimes, shape: Shape, rows: int) -> float:
    seconds = times.seconds(shape, rows)
    assert seconds is not None
    return seconds


def test_a_turn_without_rows_takes_no_time_and_nothing_is_expected_before_anything_was_measured() -> None:
    assert (StepTimes().seconds(SMALL, 2), StepTimes().seconds(SMALL, 0)) == (None, 0)
    assert _times((SMALL, 2, 0.1)).seconds(SMALL, 0) == 0


@pytest.mark.parametrize(
    ("row_counts", "rows", "seconds"),
    [([8, 2, 4], 3, 0.025), ([8, 2, 4], 6, 0.04), ([8, 2, 4], 8, 0.05), ([8, 2, 4], 16, 0.09), ([2], 6, 0.06)],
    ids=["halfway between two", "halfway between two others", "the last", "on the last slope", "in proportion to one"],
)
def test_between_row_counts_it_interpolates_and_beyond_them_it_goes_on(
    row_counts: list[int], rows: int, seconds: float
) -> None:
    times = _times(*((SMALL, count, {2: 0.02, 4: 0.03, 8: 0.05}[count]) for count in row_counts))
    assert times.seconds(SMALL, rows) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("entries", "part_s"),
    [([(1, 1.0), (2, 2.0)], 0.5), ([(1, 1.0), (2, 1.2)], 0.9), ([(1, 1.0), (2, 5.0)], 0.5), ([(1, 1.0)], 0.75)],
    ids=["proportional", "mostly fixed", "never less than in proportion", "one measurement alone"],
)
def test_a_part_of_a_row_lies_on_the_line_of_whole_ones(entries: list[tuple[int, float]], part_s: float) -> None:
    times = _times(*((SMALL, rows, seconds) for rows, seconds in entries))
    assert times.seconds(SMALL, 0.5) == pytest.approx(part_s)


@settings(max_examples=40)
@given(entries=_entries, shape=_shapes)
def test_times_never_fall_with_rows_and_are_nowhere_above_what_was_measured(
    entries: list[tuple[Shape, int, float]], shape: Shape
) -> None:
    times = _times(*entries)
    curve = [_seconds(times, shape, rows) for rows in range(1, 48)]

    assert curve[0] > 0
    assert all(more >= fewer * (1 - 1e-12) for fewer, more in pairwise(curve))
    assert all(_seconds(times, shape, rows) <= seconds * (1 + 1e-12) for shape, rows, seconds in entries)


def test_an_outlier_counts_as_at_most_twice_what_was_expected() -> None:
    paused, slow = _times((LARGE, 2, 0.01)), StepTimes()
    for times, last in ((paused, 60.0), (slow, 0.2)):
        for seconds in [0.1] * 20 + [last]:  # the first of which replaces a guess
            times.observe(SMALL, 2, seconds)
    assert paused.seconds(SMALL, 2) == slow.seconds(SMALL, 2) == pytest.approx(0.11)


@pytest.mark.parametrize(
    ("turns", "seconds"),
    [
        ([0.10, 0.12, 0.14], pytest.approx(0.12)),
        ([60.0], pytest.approx(0.4)),  # twice the 0.2 that four rows were expected to take
        ([60.0, 0.15, 0.15, 0.15], pytest.approx(0.15, rel=0.5)),
    ],
    ids=["averaged", "of which one that is an outlier is one too", "and soon forgotten"],
)
def test_the_first_turns_of_a_row_count(turns: list[float], seconds: object) -> None:
    times = _times((SMALL, 2, 0.1))
    for taken_s in turns:
        times.observe(SMALL, 4, taken_s)

    assert times.seconds(SMALL, 4) == seconds


def test_a_change_of_clock_speed_is_followed_within_twenty_turns() -> None:
    for seconds in (0.05, 0.2):
        times = StepTimes()
        for turn in range(220):
            times.observe(SMALL, 2, 0.1 if turn < 200 else seconds)
        assert times.seconds(SMALL, 2) == pytest.approx(seconds, rel=0.15)


def _aged(*entries: tuple[Shape, int, float], shape: Shape = SMALL, rows: int = 2, seconds: float = 0.02) -> StepTimes:
    """A table of which all but one row count is outdated."""
    times = StepTimes()
    for entry in entries:
        times.observe(*entry)
    for _ in range(OUTDATED_TURNS):
        times.observe(shape, rows, seconds)
    return times


def test_a_row_count_that_did_not_run_for_long_is_outdated_until_it_runs() -> None:
    times = StepTimes()
    times.observe(SMALL, 4, 0.3)
    for _ in range(OUTDATED_TURNS):
        assert not times.outdated(SMALL, 4)
        times.observe(SMALL, 2, 0.02)
    assert times.outdated(SMALL, 4)
    assert not times.outdated(SMALL, 2)
    times.observe(SMALL, 4, 0.3)
    assert not times.outdated(SMALL, 4)


def test_after_a_trial_nothing_is_tried_for_a_while() -> None:
    times = _aged((SMALL, 4, 0.3))
    times.tried()
    for _ in range(TRIAL_PAUSE_TURNS):
        assert not times.outdated(SMALL, 4)
        times.observe(SMALL, 2, 0.02)
    assert times.outdated(SMALL, 4)


def test_between_row_counts_the_larger_one_is_leant_on_and_beyond_them_nothing_is_tried() -> None:
    times = _aged((SMALL, 4, 0.3), (SMALL, 16, 0.9), rows=8, seconds=0.8)
    assert [rows for rows in range(1, 33) if times.outdated(SMALL, rows)] == [1, 2, 3, 4, *range(9, 17)]


def test_what_is_borrowed_is_as_old_as_it_is_where_it_was_measured() -> None:
    times = _aged((SMALL, 1, 0.1), (SMALL, 8, 0.8), shape=LARGE)
    assert [times.outdated(LARGE, rows) for rows in (4, 8, 9)] == [True, True, False]
    times.observe(LARGE, 4, 0.1)
    assert not times.outdated(LARGE, 8), "nothing is borrowed any more"
    assert not StepTimes().outdated(LARGE, 2)


def test_an_outdated_time_is_learnt_anew_where_it_was_too_high() -> None:
    times = _aged((SMALL, 4, 0.3), (SMALL, 4, 0.3))
    times.observe(SMALL, 4, 0.03)
    assert times.seconds(SMALL, 4) == 0.03
    times.observe(SMALL, 4, 0.04)
    assert times.seconds(SMALL, 4) == pytest.approx(0.035), "as if it had never run before"


def test_one_slow_turn_does_not_replace_an_outdated_time() -> None:
    times = _aged(*[(SMALL, 4, 0.03)] * 20)
    times.observe(SMALL, 4, 60.0)
    assert times.seconds(SMALL, 4) == pytest.approx(0.033)


def test_what_is_outdated_does_not_hide_that_the_machine_has_become_slower() -> None:
    times = _aged((SMALL, 2, 0.02), (SMALL, 4, 0.03), seconds=0.09)
    assert _seconds(times, SMALL, 2) == pytest.approx(0.09)
    assert _seconds(times, SMALL, 4) == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("measured", "shape", "rows", "seconds"),
    [
        ([((8, 8), 2, 1.0)], (16, 32), 2, 0.04),  # that of the nearest area, and in proportion to it
        ([((8, 8), 2, 1.0)], LARGE, 3, 4 * 0.025),
        ([(LARGE, 2, 0.1)], LARGE, 2, 0.1),
        ([(LARGE, 2, 0.1)], LARGE, 4, 0.15),  # of a shape that ran with one row count it borrows the growth alone
        ([(LARGE, 2, 0.1)], (64, 64), 4, 0.6),  # by way of the nearest shape
        ([(LARGE, 2, 0.1), (LARGE, 4, 0.2)], LARGE, 8, 0.4),  # which ran with two, and borrows nothing
    ],
)
def test_a_shape_borrows_from_the_nearest_one_what_it_does_not_know(
    measured: list[tuple[Shape, int, float]], shape: Shape, rows: int, seconds: float
) -> None:
    times = _times((SMALL, 2, 0.02), (SMALL, 4, 0.03), *measured)
    assert times.seconds(shape, rows) == pytest.approx(seconds)


@settings(max_examples=40)
@given(entries=_entries, runs=st.lists(st.integers(1, 8), max_size=4))
def test_a_table_is_the_same_on_the_other_side_of_a_wire(
    entries: list[tuple[Shape, int, float]], runs: list[int]
) -> None:
    here = _aged(*entries)
    for rows in runs:
        here.observe(SMALL, rows, 0.02)

    there = StepTimes.from_entries(
        here.entries(), outdated={(shape, rows) for shape, rows, _ in here.entries() if here.outdated(shape, rows)}
    )

    asked = [(shape, rows) for shape in [SMALL, *(shape for shape, _, _ in entries)] for rows in range(1, 33)]
    assert list(there.entries()) == list(here.entries())
    assert [there.seconds(*each) for each in asked] == [here.seconds(*each) for each in asked]
    assert [there.outdated(*each) for each in asked] == [here.outdated(*each) for each in asked]


def test_entries_without_rows_time_or_area_are_left_out() -> None:
    good = (SMALL, 2, 0.5)
    times = _times((SMALL, 0, 0.1), (SMALL, -2, 0.1), (SMALL, 4, 0.0), ((0, 16), 2, 0.02), ((-4, -4), 2, 0.02), good)

    assert list(times.entries()) == [good]
    assert times.seconds((0, 0), 2) == 0.5, "an unknown shape borrows times as they are"


def test_of_many_shapes_those_that_ran_last_are_remembered() -> None:
    times = StepTimes()
    for width in range(1, MAX_SHAPES + 10):
        times.observe((16, 16), 2, 0.03)
        times.observe((8, width), 2, 0.01)
    shapes = {shape for shape, _, _ in times.entries()}
    assert len(shapes) == MAX_SHAPES
    assert (16, 16) in shapes
    assert (8, 1) not in shapes
    assert times.seconds((8, 1), 2) is not None


def test_a_table_from_a_wire_is_settled_and_bounded() -> None:
    times = _times(*(((8, width), rows, 0.01 * rows) for width in range(1, 100) for rows in (1, 2)))
    assert len({shape for shape, _, _ in times.entries()}) == MAX_SHAPES
    assert times.seconds((8, 1), 2) == 0.02
    times.observe((8, 1), 2, 0.04)
    assert times.seconds((8, 1), 2) == pytest.approx(0.022)


def times(seconds: Callable[[float], float]) -> StepTimes:
    return StepTimes.from_entries((SHAPE, rows, seconds(rows)) for rows in (1, 2, 4, 8, 16))


def gaining(rows: float) -> float:
    return 0.02 + 0.01 * rows


@settings(max_examples=40)
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


def test_of_many_shapes_with_edits_the_one_that_ran_longest_ago_is_forgotten() -> None:
    fractions = RowFractions()
    for side in range(8, 8 + MAX_SHAPES + 1):
        fractions.observe(times(gaining), (side, side), rows=2, shares=[0.1, 0.1], seconds=0.0)
    assert [shape for shape, _ in fractions.entries()] == [(side, side) for side in range(9, 9 + MAX_SHAPES)]


def test_turns_that_say_nothing_change_nothing() -> None:
    fractions = RowFractions()
    before = fractions.fraction(SHAPE, 0.2)
    fractions.observe(StepTimes(), SHAPE, rows=2, shares=[0.2, 0.2], seconds=1.0)
    fractions.observe(times(gaining), SHAPE, rows=2, shares=[1.0, 1.0], seconds=0.001)
    fractions.observe(times(gaining), SHAPE, rows=2, shares=[], seconds=0.001)
    assert fractions.fraction(SHAPE, 0.2) == before


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
