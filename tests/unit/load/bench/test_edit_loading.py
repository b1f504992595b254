"""What the bench of loading says of what it has measured, and how the paper's algorithm decides."""

from __future__ import annotations

import pytest

from bottega.planning import BlockCost
from load.bench.edit_loading import WAYS, Measured, values_of
from load.bench.edit_loading_engine import LOAD_FREE, NO_CACHE, Loaded
from load.bench.greedy_loading import decide_one_by_one


def edits(*seconds: float) -> list[Loaded]:
    return [Loaded(steps_s=each, r2=0.99) for each in seconds]


def test_the_plan_is_compared_with_the_best_other_way_and_computing_all_is_one() -> None:
    slow = dict(zip(WAYS, (edits(9.0), edits(8.0), edits(6.0), edits(4.4)), strict=True))
    doubling = dict(zip(WAYS, (edits(4.0), edits(2.5), edits(2.2, 2.4, 9.0), edits(2.1)), strict=True))
    measured = Measured(
        alone={NO_CACHE: edits(4.0), LOAD_FREE: edits(2.0)}, stored={"doubling": doubling, "slow": slow}
    )
    values = values_of(measured, ["doubling", "slow"])
    assert values["slow_plan_over_best"] == values["plan_over_best"] == pytest.approx(1.1)
    assert values["doubling_plan_over_best"] == pytest.approx(2.1 / 2.4)
    assert values["plan_over_loadfree"] == pytest.approx(1.05)
    assert values["sequence_over_loadfree"] == 2.0
    assert values["fit_r2"] == 0.99


def test_one_by_one_a_block_takes_what_makes_it_end_no_later() -> None:
    def block(full_s: float, masked_s: float, load_s: float, ready_s: float = 0.0) -> BlockCost:
        return BlockCost(name="", full_s=full_s, masked_s=masked_s, load_s=load_s, ready_s=ready_s)

    first = [block(2.0, 0.5, 1.5), block(2.0, 0.5, 2.0), block(1.0, 0.5, 2.0)]
    # They end at 2 (as late as computed in full), at 4, and computed in full at 5.
    assert decide_one_by_one([first]) == [True, True, False]
    # The load stream runs on, and what is on its way waits for nobody else.
    assert decide_one_by_one([first, [block(2.0, 0.5, 1.0), block(2.0, 0.5, 0.0, ready_s=99.0)]])[3:] == [True, False]
    assert decide_one_by_one([first], load_busy_s=0.5) == [False, True, False]
