"""Pairs of prompts, their samples in a file, and the thresholds that samples say."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bottega.addons.cache.client.samples import (
    Method,
    PairSample,
    PromptPair,
    SampleFile,
    measured_profile,
    miniature_pairs,
    pairs_of_file,
    skip_profile,
    thin_out,
    use_of,
)
from bottega.addons.cache.client.types import profile_from, profile_to_wire
from bottega.addons.cache.skip_profile import count_words
from bottega.addons.cache.starts import FRACTIONS
from bottega.errors import InvalidRequest
from bottega.miniature.scenes import read_caption


def test_lines_make_pairs_with_the_line_before_unless_one_is_empty_or_short() -> None:
    text = "one star\none red star\none big star\n\na dog sits\n  a dog on the moon \na dog on the moon\na cat sits\n"

    assert pairs_of_file(text) == [
        PromptPair(first="one red star", second="one big star"),
        PromptPair(first="a dog sits", second="a dog on the moon"),
        PromptPair(first="a dog on the moon", second="a cat sits"),
    ]


def test_the_embedded_models_pairs_are_sentences_that_the_oracle_reads_and_differ() -> None:
    pairs = miniature_pairs(200)

    assert all(read_caption(pair.first) and read_caption(pair.second) for pair in pairs)
    assert all(pair.first != pair.second for pair in pairs)
    # Both lengths of prompts have enough of them.
    long = sum(count_words(pair.second) > 15 for pair in pairs)
    assert long >= 40
    things = Counter(len(scene.things) for pair in pairs if (scene := read_caption(pair.second)))
    assert things == {1: 100, 2: 100}


def test_too_many_pairs_are_thinned_out_over_all_of_them() -> None:
    pairs = [PromptPair(first=str(number), second="x") for number in range(10)]

    assert [pair.first for pair in thin_out(pairs, 4)] == ["0", "2", "5", "7"]
    assert thin_out(pairs, 10) == pairs


METHOD = Method(model_hash="ab" * 32, num_inference_steps=30, draws=4, judge="the oracle")
SAMPLE = PairSample(
    first="a star", second="a ring", words=2, similarity=0.8, uncached=0.9, cached={0.1: 0.9, 0.5: 0.25}
)


def test_what_was_measured_is_not_measured_again_but_a_line_that_was_cut_off_is(tmp_path: Path) -> None:
    path = tmp_path / "samples"
    SampleFile(path, METHOD).add(SAMPLE)
    path.write_text(path.read_text() + '{"first": "a st')

    SampleFile(path, METHOD).add(replace(SAMPLE, second="a heart"))

    kept = SampleFile(path, METHOD)
    assert [each.second for each in kept.samples] == ["a ring", "a heart"]
    other = PromptPair(first="a ring", second="a star")
    assert kept.missing([SAMPLE.pair, other]) == [other]


def test_a_file_of_another_measurement_is_refused(tmp_path: Path) -> None:
    SampleFile(tmp_path / "samples", METHOD)
    others = ({"model_hash": "cd" * 32}, {"num_inference_steps": 20}, {"draws": 1}, {"judge": "a CLIP score"})
    for other in others:
        with pytest.raises(InvalidRequest, match="another way"):
            SampleFile(tmp_path / "samples", replace(METHOD, **other))


@pytest.mark.parametrize("data", [b"[]\n", b'{"first": 1}\n', b"cut off", b"\xff\n"])
def test_a_file_that_is_none_of_samples_is_refused_and_left_as_it_is(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "samples"
    path.write_bytes(data)

    with pytest.raises(InvalidRequest):
        SampleFile(path, METHOD)

    assert path.read_bytes() == data
    with pytest.raises(InvalidRequest, match="No such file or directory; name another file"):
        SampleFile(tmp_path / "nowhere" / "samples", METHOD)


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
    profile = measured_profile("ab" * 32, _samples(100, lost=0.15, from_similarity=2.0), "how")

    assert not profile.balanced.classes
    (fewer, fast) = profile.fast.classes
    assert (fewer.max_words, fewer.thresholds) == (9, {})
    assert fast.thresholds == dict.fromkeys(FRACTIONS, 0.0)
    assert (profile.model_hash, profile.about, fast.max_words) == ("ab" * 32, "how", 10)
    assert profile_from(profile_to_wire(profile)) == profile


def test_a_model_of_which_nothing_may_be_reused_has_a_profile_that_says_so() -> None:
    profile = measured_profile("ab" * 32, _samples(100, lost=0.9, from_similarity=2.0), "how")

    assert [(each.max_words, each.thresholds) for each in profile.balanced.classes] == [(math.inf, {})]
    assert not profile.fast.classes
    assert [list(each.thresholds) for each in profile_to_wire(profile).balanced] == [[]]


def test_long_prompts_have_thresholds_of_their_own() -> None:
    samples = _samples(200, lost=0.5, from_similarity=0.1) + _samples(200, words=16, lost=0.5, from_similarity=0.4)

    profile = measured_profile("ab" * 32, samples, "how")

    _, short, long = profile.balanced.classes
    assert (short.max_words, long.max_words) == (15, 16)
    assert all(long.thresholds[fraction] > short.thresholds[fraction] for fraction in FRACTIONS)


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
