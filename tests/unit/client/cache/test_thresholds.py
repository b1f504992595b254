"""The profile that samples say: by fidelity, by length, and what it means for the pairs."""

from __future__ import annotations

import pytest

from bottega.client.addons.cache.samples import PairSample, profile_message, skip_profile, use_of
from bottega.latents.names import FRACTIONS


def _samples(count: int, *, words: int = 10, lost: float = 0.0, from_similarity: float = 0.0) -> list[PairSample]:
    """Similarities evenly in 0 to 1; below from_similarity + the fraction, a cached picture loses so much."""
    return [
        PairSample(
            first=f"first {words} {number}",
            second=f"second {words} {number}",
            words=words,
            similarity=number / count,
            uncached=1.0,
            cached={each: 1.0 - lost * (number / count < from_similarity + each) for each in FRACTIONS},
        )
        for number in range(count)
    ]


def test_latents_that_stand_for_more_steps_need_more_similarity() -> None:
    profile = skip_profile(_samples(400, lost=0.5, from_similarity=0.3), 0.9)

    (_, short) = profile.classes
    # A twentieth of all above the threshold may be bad: those just below the step at which quality is lost.
    for fraction in FRACTIONS:
        whole = 0.3 + fraction
        assert short.thresholds[fraction] == pytest.approx(whole - (1 - whole) / 19, abs=0.01)


def test_fast_allows_a_loss_that_balanced_does_not() -> None:
    message = profile_message("ab" * 32, _samples(100, lost=0.15, from_similarity=2.0), "how")

    assert not message.balanced
    (fewer, fast) = message.fast
    assert (fewer.max_words, list(fewer.thresholds)) == (9, [])
    assert [(each.fraction, each.similarity) for each in fast.thresholds] == [(each, 0.0) for each in FRACTIONS]
    assert (message.model_hash, message.about, fast.max_words) == ("ab" * 32, "how", 10)


def test_a_model_of_which_nothing_may_be_reused_has_a_profile_that_says_so() -> None:
    message = profile_message("ab" * 32, _samples(100, lost=0.9, from_similarity=2.0), "how")

    assert [list(each.thresholds) for each in message.balanced] == [[]]
    assert not message.fast


def test_long_prompts_have_thresholds_of_their_own() -> None:
    samples = _samples(200, lost=0.5, from_similarity=0.1) + _samples(200, words=16, lost=0.5, from_similarity=0.4)

    message = profile_message("ab" * 32, samples, "how")

    _, short, long = message.balanced
    assert (short.max_words, long.max_words) == (15, 16)
    assert all(more.similarity > less.similarity for more, less in zip(long.thresholds, short.thresholds, strict=True))


def test_a_length_of_which_too_few_were_drawn_reuses_nothing() -> None:
    profile = skip_profile(_samples(200) + _samples(19, words=16), 0.9)

    assert [each.max_words for each in profile.classes] == [9, 15]


def test_short_prompts_keep_their_place_where_only_long_ones_are_reused() -> None:
    profile = skip_profile(_samples(200, lost=0.5, from_similarity=2.0) + _samples(200, words=16), 0.9)

    found = [(each.max_words, bool(each.thresholds)) for each in profile.classes]
    assert found == [(9, False), (15, False), (16, True)]


def test_prompts_shorter_or_longer_than_all_that_were_measured_reuse_nothing() -> None:
    profile = skip_profile(_samples(200, words=4) + _samples(200, words=20), 0.9)

    assert not any(profile.thresholds(words) for words in (0, 1, 3, 21, 1000))
    assert all(profile.thresholds(words) for words in (4, 12, 20))


def test_what_a_profile_means_for_its_pairs_counts_each_pair_once_by_its_longest_skip() -> None:
    samples = _samples(100, lost=0.5, from_similarity=0.3)

    use = use_of(skip_profile(samples, 0.9), samples)

    assert use.pairs == 100
    # From .4 of the similarities on something is skipped, and from .8 on half of the steps.
    assert sum(use.shares.values()) == pytest.approx(0.63, abs=0.02)
    assert use.shares[0.5] == pytest.approx(0.2, abs=0.02)
    assert use.uncached == 1.0
    # Each threshold lets a twentieth of what is above it be bad, and these add up.
    assert use.cached == pytest.approx(0.93, abs=0.01)
