"""The bench of a day: what its requests are, and what its runs come to."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.errors import ConfigError
from load.bench.day_figures import Comparison
from load.bench.day_requests import DayShape, rate_for, warm_up_requests
from load.replay.requests import PlannedRequest
from tests.support.days import (
    DEADLINE_S,
    DRAW,
    EDIT,
    LORAS,
    NETS,
    answered,
    compared,
    figures,
    refused,
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


def test_a_days_first_requests_are_known_before_its_rate_is() -> None:
    sample, requests = SHAPE.sample(seed=4), SHAPE.requests(rate_per_s=2.0, seed=4)
    assert [replace(each, at_s=0.0) for each in sample[: len(requests)]] == [
        replace(each, at_s=0.0) for each in requests
    ]


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


def test_a_mix_that_the_plain_server_cannot_draw_is_refused(tmp_path: Path) -> None:
    mix = tmp_path / "edits.toml"
    mix.write_text("minutes = 1\nrate_per_s = 1\n[edits]\nshare = 1.0\n[controlnets]\nof_edits = 1.0\n")
    with pytest.raises(ConfigError, match="edits with ControlNets"):
        replace(SHAPE, mix=str(mix)).requests(rate_per_s=1.0, seed=1)


def test_every_controlnet_and_both_kinds_are_drawn_before_a_day_with_prompts_of_its_own() -> None:
    requests = SHAPE.sample(seed=1)
    wanted = warm_up_requests(requests, NETS)
    assert {name for request in wanted for name in request.controlnets} == set(NETS)
    assert {request.kind for request in wanted} == {"draw", "edit"}
    assert any(request.loras for request in wanted)
    prompts = [request.prompt for request in wanted]
    assert len(set(prompts)) == len(prompts)
    assert not {*prompts} & {request.prompt for request in requests}


def test_an_answer_is_in_time_by_what_its_own_class_takes_alone() -> None:
    side = figures(answered(DRAW, 5.9), answered(DRAW, 6.1), answered(EDIT, 2.9), answered(EDIT, 3.1), refused(EDIT))
    assert side.good == 2
    assert side.good_share == pytest.approx(0.4)
    assert side.answered == 4


def test_what_was_not_answered_counts_as_long_as_anybody_waits() -> None:
    side = figures(*(answered(EDIT, 1.0) for _ in range(9)), refused(EDIT))
    assert side.latency_s(0.9) == 1.0
    assert side.latency_s(0.95) == DEADLINE_S
    assert side.slowdowns[-1] == math.inf
    assert side.reasons == ["1 refused: Overloaded"]


def test_pictures_a_core_minute_are_those_that_came_for_the_processor_time_of_their_side() -> None:
    assert figures(*(answered(EDIT, 1.0) for _ in range(6)), refused(EDIT), processor_s=120.0).per_core_minute == 3.0


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


def test_a_plain_server_that_is_never_in_time_makes_no_ratio_infinite() -> None:
    late = figures(answered(EDIT, 30.0), answered(EDIT, 30.0))
    comparison = Comparison(plain=late, suite=figures(answered(EDIT, 1.0), answered(EDIT, 1.0)), without={})
    assert comparison.goodput_ratio == 2.0


def test_a_run_that_went_out_late_is_named() -> None:
    held_up = replace(answered(EDIT, 9.0), delay_s=5.0)
    comparison = replace(compared(), plain=figures(*(held_up for _ in range(5))))
    assert [why.partition(":")[0] for why in comparison.void] == ["plain"]
    assert comparison.values()["void_runs"] == 1
