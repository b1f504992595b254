"""From similarity to steps, and Algorithm 2 as it is read here, against counting it out."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bottega.addons.cache.skip_profile import (
    NIRVANA_768,
    LengthClass,
    PredictorRates,
    PredictorSwitch,
    QualitySample,
    SkipProfile,
    fallback_profile,
    least_similarity,
    measured_class,
    served_step,
    skip_steps,
)
from bottega.addons.cache.starts import recorded_steps

PROFILE = SkipProfile(
    classes=(
        LengthClass(max_words=8, thresholds={0.1: 0.5, 0.2: 0.6, 0.3: 0.65, 0.5: 0.9}),
        LengthClass(max_words=math.inf, thresholds={0.1: 0.8}),
    )
)


@pytest.mark.parametrize(
    ("similarity", "step"),
    [
        *((0.64, 0), (0.65, 5), (0.749, 5), (0.75, 10), (0.84, 10)),
        *((0.85, 15), (0.9, 20), (0.949, 20), (0.95, 25), (1.0, 25)),
    ],
)
def test_the_fallback_is_nirvanas_table(similarity: float, step: int) -> None:
    profile = fallback_profile(768)
    assert profile is NIRVANA_768
    assert max(skip_steps(profile, similarity=similarity, words=15, steps=50), default=0) == step
    assert not skip_steps(profile, similarity=similarity, words=16, steps=50), "similarity misleads in long prompts"


@pytest.mark.parametrize(
    ("similarity", "words", "steps", "allowed"),
    [
        (0.7, 8, 50, (15, 10, 5)),
        (0.9, 8, 50, (25, 15, 10, 5)),  # .4 is not named
        (0.9, 9, 50, (5,)),
        (0.9, 1, 25, (12, 8, 5, 2)),  # whole steps near the fractions
        (0.9, 1, 5, (1,)),  # 2 of 5 are .4
        (0.6, 1, 4, ()),  # 1 of 4 is as near to .2 as to .3: counts as .3
        (1.0, 1, 1, ()),
        (math.nan, 1, 50, ()),
        (-1.0, 1, 50, ()),
    ],
)
def test_a_similarity_allows_the_steps_of_its_class(
    similarity: float, words: int, steps: int, allowed: tuple[int, ...]
) -> None:
    assert skip_steps(PROFILE, similarity=similarity, words=words, steps=steps) == allowed


@given(
    steps=st.integers(1, 150),
    words=st.integers(0, 20),
    less=st.floats(-1, 1),
    more=st.floats(-1, 1),
)
def test_more_similarity_never_allows_less_and_never_more_than_half(
    steps: int, words: int, less: float, more: float
) -> None:
    less, more = sorted((less, more))
    fewer = skip_steps(PROFILE, similarity=less, words=words, steps=steps)
    all_ = skip_steps(PROFILE, similarity=more, words=words, steps=steps)
    assert set(fewer) <= set(all_) <= set(recorded_steps(steps))
    assert list(all_) == sorted(all_, reverse=True)
    assert all(step <= 0.55 * steps for step in all_)


def test_a_hole_is_served_by_the_largest_step_below() -> None:
    assert served_step((25, 20, 15), {25, 15, 5}) == 25
    assert served_step((20, 15, 10, 5), {25, 10, 5}) == 10
    assert served_step((10, 5), {25, 15}) == 0
    assert served_step((), {5}) == 0


@pytest.mark.parametrize(
    ("thresholds", "message"),
    [
        ({0.15: 0.5}, "0.15"),
        ({0.1: 1.1}, "cosine"),
        ({0.1: math.nan}, "cosine"),
        ({0.1: 0.7, 0.3: 0.6}, "at least the similarity"),
    ],
)
def test_thresholds_that_are_none_are_refused(thresholds: dict[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthClass(max_words=5, thresholds=thresholds)


def test_classes_ascend_and_have_words() -> None:
    with pytest.raises(ValueError, match="ascending"):
        SkipProfile(classes=PROFILE.classes[::-1])
    for words in (0, math.nan):
        with pytest.raises(ValueError, match="at least 1"):
            LengthClass(max_words=words, thresholds={})


def _samples(*parts: tuple[int, float, bool]) -> list[QualitySample]:
    """So many of a similarity, good or not, in some order."""
    samples = [
        QualitySample(similarity=similarity, cached=float(good), uncached=1.0)
        for count, similarity, good in parts
        for _ in range(count)
    ]
    random.Random(0).shuffle(samples)
    return samples


def test_too_few_samples_or_none_good_enough_allow_nothing() -> None:
    assert least_similarity([], alpha=0.9) is None
    assert least_similarity(_samples((19, 0.9, True)), alpha=0.9) is None
    assert least_similarity(_samples((20, 0.9, True)), alpha=0.9) == 0.9
    assert least_similarity(_samples((50, 0.9, False), (50, 0.8, True)), alpha=0.9) is None


@pytest.mark.parametrize(
    ("cached", "uncached", "alpha", "good"),
    [
        (28.0, 30.0, 0.9, True),
        (27.0, 30.0, 0.9, False),  # above, not at
        (0.0, 0.0, 0.9, True),  # nothing was lost
        (-1.0, -2.0, 0.9, True),
    ],
)
def test_a_picture_is_good_that_is_above_alpha_times_the_uncached_one(
    cached: float, uncached: float, alpha: float, good: bool
) -> None:
    assert QualitySample(similarity=1.0, cached=cached, uncached=uncached).good(alpha) is good


@given(
    st.lists(st.tuples(st.integers(0, 10), st.sampled_from([True, True, True, False])), min_size=1, max_size=80),
    st.sampled_from([0.5, 0.75, 0.95]),
)
def test_the_least_similarity_is_that_of_its_definition(seen: list[tuple[int, bool]], share: float) -> None:
    samples = [QualitySample(similarity=tenths / 10, cached=good, uncached=1.0) for tenths, good in seen]
    enough = []
    for similarity in {sample.similarity for sample in samples}:
        above = [sample.good(0.9) for sample in samples if sample.similarity >= similarity]
        if len(above) >= 20 and sum(above) >= share * len(above):
            enough.append(similarity)
    assert least_similarity(samples, alpha=0.9, share=share) == min(enough, default=None)


def test_measured_thresholds_never_fall_and_end_where_nothing_is_enough() -> None:
    good = {
        0.1: _samples((30, 0.8, True)),
        0.2: _samples((30, 0.7, True)),  # easier than .1 by chance
        0.3: _samples((30, 0.9, True)),
        0.4: _samples((30, 0.9, False)),
        0.5: _samples((30, 0.95, True)),
    }
    measured = measured_class(math.inf, good, alpha=0.9)
    assert measured == LengthClass(max_words=math.inf, thresholds={0.1: 0.8, 0.2: 0.8, 0.3: 0.9})


def _rates(hit_rate: float, specificity: float, recall: float, lookup_s: float, saved_s: float) -> PredictorRates:
    return PredictorRates(
        hit_rate=hit_rate, specificity=specificity, recall=recall, precision=0.0, lookup_s=lookup_s, saved_s=saved_s
    )


@pytest.mark.parametrize(
    ("rates", "pays"),
    [
        (_rates(0.93, 0.5, 0.95, 2.0, 1.0), True),  # .07 against .0465
        (_rates(0.5, 0.5, 0.5, 1.0, 1.0), False),  # equal: not more
        (_rates(0.5, 0.51, 0.5, 1.0, 1.0), True),
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
