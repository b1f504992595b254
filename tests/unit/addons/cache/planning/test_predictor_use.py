"""When a match predictor is on: by the rule, and by rates that are measured while it spares look-ups."""

from __future__ import annotations

import random

import pytest

from bottega.addons.cache.planning.predictor_use import PredictorRates, PredictorSwitch


def _rates(hit_rate: float, specificity: float, recall: float, lookup_s: float, saved_s: float) -> PredictorRates:
    return PredictorRates(
        hit_rate=hit_rate, specificity=specificity, recall=recall, precision=0.0, lookup_s=lookup_s, saved_s=saved_s
    )


@pytest.mark.parametrize(
    ("rates", "pays"),
    [
        (_rates(0.93, 0.5, 0.95, 0.001, 1.0), False),  # .000035 s against .0465 s
        (_rates(0.93, 0.5, 0.95, 2.0, 1.0), True),  # .07 against .0465
        (_rates(0.5, 0.5, 0.5, 1.0, 1.0), False),  # equal: not more
        (_rates(0.5, 0.51, 0.5, 1.0, 1.0), True),
        (_rates(0.0, 0.1, 0.0, 0.001, 1.0), True),
        (_rates(0.9, 0.9, 1.0, 0.001, 1.0), True),  # loses nothing
        (_rates(1.0, 0.0, 1.0, 1.0, 1.0), False),
        (_rates(0.5, 0.0, 1.0, 1.0, 1.0), False),  # always yes
    ],
)
def test_the_predictor_is_on_while_spared_lookups_exceed_lost_hits(rates: PredictorRates, pays: bool) -> None:
    assert rates.pays is pays


def _is_on(switch: PredictorSwitch) -> bool:
    """Asked anew each time: mypy takes a property for what it was."""
    return switch.on


def _run(switch: PredictorSwitch, questions: int, *, hits: float, right: float, lookup_s: float, seed: int = 0) -> int:
    """Asks; the predictor is right with a probability, whatever the answer. Returns how many were searched."""
    chance, searched = random.Random(seed), 0
    for _ in range(questions):
        hit = chance.random() < hits
        predicted_hit = hit if chance.random() < right else not hit
        weight = switch.weight(predicted_hit)
        if weight:
            searched += 1
            switch.record(weight, predicted_hit=predicted_hit, hit=hit, lookup_s=lookup_s, saved_s=1.0 if hit else None)
    return searched


def test_it_goes_on_where_lookups_are_slow_and_off_again_where_they_are_fast() -> None:
    switch = PredictorSwitch()
    assert _run(switch, 199, hits=0.3, right=0.9, lookup_s=1.0) == 199, "believed before it was measured"
    _run(switch, 500, hits=0.3, right=0.9, lookup_s=1.0)
    assert _is_on(switch)
    _run(switch, 4000, hits=0.3, right=0.9, lookup_s=0.001)
    assert not _is_on(switch)
    assert _run(switch, 1000, hits=0.3, right=0.9, lookup_s=0.001) == 1000
    _run(switch, 4000, hits=0.3, right=0.9, lookup_s=1.0)
    assert _is_on(switch)


def test_rates_stay_those_of_all_questions_while_few_of_the_predicted_misses_are_searched() -> None:
    switch = PredictorSwitch(half_life=20_000)
    searched = _run(switch, 40_000, hits=0.4, right=0.8, lookup_s=1.0)
    assert _is_on(switch)
    predicted_hits = 0.4 * 0.8 + 0.6 * 0.2
    assert searched / 40_000 == pytest.approx(predicted_hits + (1 - predicted_hits) / 20, abs=0.02)
    rates = switch.rates
    assert rates.hit_rate == pytest.approx(0.4, abs=0.03)
    assert rates.recall == pytest.approx(0.8, abs=0.03)
    assert rates.specificity == pytest.approx(0.8, abs=0.03)
    assert rates.precision == pytest.approx(0.32 / predicted_hits, abs=0.03)
    assert [rates.lookup_s, rates.saved_s] == pytest.approx([1.0, 1.0])


def test_a_predictor_that_got_worse_is_found_out_by_probes() -> None:
    """All hits become predicted misses: only the probes can tell."""
    switch = PredictorSwitch()
    _run(switch, 2000, hits=0.1, right=0.95, lookup_s=0.3)
    assert _is_on(switch)
    _run(switch, 2000, hits=0.9, right=0.05, lookup_s=0.3)
    assert not _is_on(switch)


def test_the_past_loses_half_of_its_weight_in_a_half_life() -> None:
    switch = PredictorSwitch(half_life=100)
    for hit in [True] * 2000 + [False] * 100:
        switch.record(1.0, predicted_hit=True, hit=hit, lookup_s=0.0)
    assert switch.rates.hit_rate == pytest.approx(0.5, abs=0.01)
    assert switch.rates.saved_s == 0.0, "nobody said"


def test_nothing_measured_is_no_reason() -> None:
    switch = PredictorSwitch()
    assert not _is_on(switch)
    assert switch.rates == _rates(0.0, 0.0, 0.0, 0.0, 0.0)


def test_it_stays_off_while_nobody_says_what_a_hit_saves() -> None:
    switch = PredictorSwitch()
    for number in range(1000):
        switch.record(1.0, predicted_hit=False, hit=number % 2 == 0, lookup_s=1.0)
    assert switch.rates.pays
    assert not switch.on
