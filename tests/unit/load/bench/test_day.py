"""The bench of a day: what its requests are, and what its runs come to."""

from __future__ import annotations

import json

import pytest

from load.bench.day_requests import DayShape, rate_for
from load.replay.requests import PlannedRequest
from tests.support.days import (
    DRAW,
    EDIT,
    LORAS,
    NETS,
    compared,
)

SHAPE = DayShape(mix="day", minutes=2.0, steps_share=0.4, templates=5, controlnets=NETS, loras=LORAS)


def test_a_compressed_day_has_the_mixes_shares_and_fewer_steps_templates_and_shorter_bursts() -> None:
    requests = SHAPE.requests(rate_per_s=10.0, seed=1)
    assert len(requests) == 1200
    assert sum(request.kind == "edit" for request in requests) / len(requests) == pytest.approx(0.7, abs=0.05)
    assert {request.steps for request in requests if request.kind == "edit"} == {8}
    assert {request.steps for request in requests if request.kind == "draw"} == {8, 12, 20}
    assert {request.template for request in requests} <= {None, *range(5)}
    assert {name for request in requests for name in request.controlnets} == set(NETS)
    bursts = SHAPE.at(10.0).arrivals.bursts
    assert bursts is not None
    assert (bursts.every_s, bursts.length_s) == pytest.approx((24.0, 0.4)), "a tenth of the mix's 20 minutes"
    assert SHAPE.requests(10.0, seed=1) == requests


def test_a_days_rate_is_that_at_which_its_own_requests_take_so_much_of_it_and_no_others_are_asked_about() -> None:
    samples = [[DRAW, EDIT, EDIT, EDIT, DRAW, DRAW], [EDIT, EDIT, DRAW, EDIT, DRAW, DRAW]]
    asked: list[int] = []

    def alone_s(request: PlannedRequest) -> float:
        asked.append(request.steps)
        return 6.0 if request.kind == "draw" else 2.0

    # The first three of a day take 10 s on average: half of 20.
    assert rate_for(samples, alone_s, load=0.5, length_s=20.0) == pytest.approx(3 / 20)
    assert len(asked) == 6
    # Where all of them are too few, the mean of all counts: 24 s for six.
    assert rate_for(samples, alone_s, load=0.5, length_s=2000.0) == pytest.approx(0.5 * 6 / 24)


def test_both_ratios_are_better_the_better_the_suite_is_and_a_techniques_worth_the_more_it_saves() -> None:
    comparison = compared()
    assert comparison.goodput_ratio == pytest.approx(20 / 5)
    assert comparison.p95_ratio == pytest.approx(30.0 / 1.5)
    assert comparison.worth("masked_blocks") == pytest.approx((20 / 10, 6.0 / 1.5))
    values = comparison.values()
    assert values["goodput_ratio"] == pytest.approx(4.0)
    assert values["masked_blocks_p95_gain"] == pytest.approx(4.0)
    assert values["void_runs"] == 0
    json.dumps(values, allow_nan=False)
