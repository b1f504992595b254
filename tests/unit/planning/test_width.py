"""How many requests run together, and when each ends: against a simulation turn by turn, and by the claims made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bottega.planning import RemainingWork, StepTimes, best_width, completion_times, rows_to_offload
from tests.support.processor_speed import on_this_machine

_works = st.lists(st.builds(RemainingWork, rows=st.integers(1, 4), steps=st.integers(0, 12)), max_size=10)
_costs = st.builds(
    lambda fixed, each: lambda rows: fixed + each * rows,
    st.floats(0, 0.1, allow_subnormal=False),
    st.floats(1e-3, 0.1),
)

Cost = Callable[[float], float]


def _gaining(rows: float) -> float:
    return 0.02 + 0.001 * rows


def _line(count: int, *, steps: int = 30, rows: int = 2) -> list[RemainingWork]:
    return [RemainingWork(rows=rows, steps=steps)] * count


def _turn_by_turn(works: Sequence[RemainingWork], seconds: Cost, width: int) -> list[float]:
    """When each ends, by running every turn."""
    ends: dict[int, float] = {}
    waiting, left, clock = list(range(len(works))), dict[int, int](), 0.0
    while waiting or left:
        while waiting and len(left) < width:
            index = waiting.pop(0)
            left[index] = works[index].steps
            for done in [index for index, steps in left.items() if steps == 0]:
                ends[done] = clock
                del left[done]
        if left:
            clock += seconds(sum(works[index].rows for index in left))
        for index in list(left):
            left[index] -= 1
            if left[index] == 0:
                ends[index] = clock
                del left[index]
    return [ends[index] for index in range(len(works))]


@settings(max_examples=50)
@given(works=_works, seconds=_costs, width=st.integers(1, 12))
def test_completion_times_are_those_of_every_turn_run(works: list[RemainingWork], seconds: Cost, width: int) -> None:
    assert completion_times(works, seconds, width) == pytest.approx(_turn_by_turn(works, seconds, width))


@settings(max_examples=50)
@given(works=_works, seconds=_costs, max_rows=st.integers(1, 16))
def test_the_width_is_the_widest_whose_mean_is_near_the_best(
    works: list[RemainingWork], seconds: Cost, max_rows: int
) -> None:
    allowed = [
        width
        for width in range(1, len(works) + 1)
        if width == 1 or sum(work.rows for work in works[:width]) <= max_rows
    ]
    sums = {width: sum(_turn_by_turn(works, seconds, width)) for width in allowed}

    width = best_width(works, seconds, max_rows=max_rows)

    slack = 1 + 1e-9
    best, alone = min(sums.values(), default=0.0), sum(work.steps * seconds(work.rows) for work in works)
    bound = min(1.05 * best, best + 0.15 * alone)
    assert width in allowed or (not works and width == 0)
    assert not works or sums[width] <= bound * slack
    assert all(total * slack >= bound for wider, total in sums.items() if wider > width)


def test_where_a_turn_is_mostly_fixed_cost_as_many_run_as_fit() -> None:
    assert [best_width(_line(count), _gaining, max_rows=16) for count in (1, 5, 8, 20)] == [1, 5, 8, 8]


def test_a_queue_of_any_length_is_looked_at_no_further_than_32() -> None:
    assert best_width(_line(5000, rows=1), _gaining, max_rows=1 << 30) == 32


def test_a_cost_is_asked_for_once_per_number_of_rows() -> None:
    asked: list[float] = []

    def seconds(rows: float) -> float:
        asked.append(rows)
        return _gaining(rows)

    best_width(_line(32), seconds, max_rows=16)

    assert len(asked) == len(set(asked))


def test_a_choice_among_32_works_takes_well_below_a_millisecond() -> None:
    times = StepTimes.from_entries(((16, 16), rows, 0.01 + 0.004 * rows) for rows in (1, 2, 4, 8, 16))
    works = [RemainingWork(rows=2, steps=20 + 7 * index % 31) for index in range(32)]
    costs = []
    for _ in range(20):
        began = time.thread_time()
        best_width(works, lambda rows: times.seconds((16, 16), rows) or 0.0, max_rows=16)
        costs.append(time.thread_time() - began)

    assert min(costs) < on_this_machine(0.0005)


def test_where_turns_take_no_time_that_there_is_one_at_a_time_runs_still() -> None:
    works = [RemainingWork(rows=2, steps=20)] * 3
    assert best_width(works, lambda rows: float("nan"), max_rows=16) >= 1
    assert best_width(works, lambda rows: float("inf"), max_rows=16) >= 1
    assert best_width(works, lambda rows: -1.0, max_rows=16) >= 1


def per_row(rows: float) -> float:
    return float(rows)


def nothing_known(_rows: float) -> None:
    return None


def test_two_like_workers_take_equal_parts_of_the_rows() -> None:
    for rows, offloadable, offloaded in ((2, 2, 1), (3, 3, 1), (4, 4, 2), (4, 1, 1), (8, 2, 2), (1, 1, 0), (2, 0, 0)):
        assert rows_to_offload(rows, offloadable, own=per_row, theirs=per_row, backlog=0) == offloaded


def test_nothing_is_lent_while_a_request_waits_for_a_worker() -> None:
    assert rows_to_offload(2, 2, own=per_row, theirs=per_row, backlog=1) == 0


def test_a_slow_worker_gets_less_and_one_that_saves_nothing_gets_nothing() -> None:
    assert rows_to_offload(8, 8, own=per_row, theirs=lambda rows: 3.0 * rows, backlog=0) == 2
    assert rows_to_offload(2, 2, own=per_row, theirs=lambda rows: 2.0 * rows, backlog=0) == 0
    assert rows_to_offload(4, 4, own=lambda _: 1.0, theirs=lambda _: 0.1, backlog=0) == 0


def test_the_leader_keeps_a_row_however_quick_the_other_one_is() -> None:
    assert rows_to_offload(2, 2, own=per_row, theirs=lambda _: 0.0, backlog=0) == 1


def test_rows_that_cost_less_count_as_what_they_cost() -> None:
    """Of eight rows, six that stay are worth one: of the two plain ones the other worker gets one."""
    assert rows_to_offload(8, 2, own=per_row, theirs=per_row, backlog=0) == 2
    assert rows_to_offload(8, 2, own=per_row, theirs=per_row, backlog=0, saved=5.0) == 1
    assert rows_to_offload(8, 2, own=per_row, theirs=lambda rows: 3.0 * rows, backlog=0, saved=5.0) == 0


def test_what_is_not_known_of_the_other_one_is_taken_from_this_one() -> None:
    assert rows_to_offload(4, 4, own=per_row, theirs=nothing_known, backlog=0) == 2
    assert rows_to_offload(4, 4, own=nothing_known, theirs=nothing_known, backlog=0) == 2
    assert rows_to_offload(4, 1, own=nothing_known, theirs=nothing_known, backlog=0) == 1
