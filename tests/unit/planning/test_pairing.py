"""How many rows of a turn the other worker of a pair gets."""

from __future__ import annotations

import pytest

from bottega.planning import rows_to_offload


def fixed_and_per_row(rows: float) -> float:
    return 1.0 + rows


def per_row(rows: float) -> float:
    return float(rows)


def nothing_known(_rows: float) -> None:
    return None


@pytest.mark.parametrize(
    ("rows", "offloadable", "offloaded"),
    [(2, 2, 1), (3, 3, 1), (4, 4, 2), (4, 2, 2), (4, 1, 1), (8, 8, 4), (8, 2, 2), (1, 1, 0), (2, 0, 0)],
)
def test_two_like_workers_take_equal_parts_of_the_rows(rows: int, offloadable: int, offloaded: int) -> None:
    assert rows_to_offload(rows, offloadable, own=per_row, theirs=per_row, backlog=0) == offloaded


def test_nothing_is_lent_while_a_request_waits_for_a_worker() -> None:
    assert rows_to_offload(2, 2, own=per_row, theirs=per_row, backlog=1) == 0


def test_a_slow_one_gets_less_and_one_that_would_hold_the_turn_up_nothing() -> None:
    assert rows_to_offload(8, 8, own=per_row, theirs=lambda rows: 3.0 * rows, backlog=0) == 2
    assert rows_to_offload(2, 2, own=per_row, theirs=lambda rows: 2.0 * rows, backlog=0) == 0


def test_the_leader_keeps_a_row_however_quick_the_other_one_is() -> None:
    assert rows_to_offload(2, 2, own=per_row, theirs=lambda _: 0.0, backlog=0) == 1


def test_nothing_is_lent_where_a_row_less_takes_no_less_time() -> None:
    assert rows_to_offload(4, 4, own=lambda _: 1.0, theirs=lambda _: 0.1, backlog=0) == 0
    assert rows_to_offload(2, 2, own=fixed_and_per_row, theirs=fixed_and_per_row, backlog=0) == 1


def test_rows_that_cost_less_count_as_what_they_cost() -> None:
    """Of eight rows, six that stay are worth one: of the two plain ones the other worker gets one."""
    assert rows_to_offload(8, 2, own=per_row, theirs=per_row, backlog=0) == 2
    assert rows_to_offload(8, 2, own=per_row, theirs=per_row, backlog=0, saved=5.0) == 1
    assert rows_to_offload(8, 2, own=per_row, theirs=lambda rows: 3.0 * rows, backlog=0, saved=5.0) == 0


def test_what_is_not_known_of_the_other_one_is_taken_from_this_one() -> None:
    assert rows_to_offload(4, 4, own=per_row, theirs=nothing_known, backlog=0) == 2
    assert rows_to_offload(4, 4, own=nothing_known, theirs=nothing_known, backlog=0) == 2
    assert rows_to_offload(4, 1, own=nothing_known, theirs=nothing_known, backlog=0) == 1
