"""Which latents are started from, of those of similar prompts."""

from __future__ import annotations

import math

import pytest

from bottega.addons.cache.skip_profile import LengthClass, SkipProfile
from bottega.cache.store.selector import Candidate, Exploration, select_latents

_PROFILE = SkipProfile(
    classes=(
        LengthClass(max_words=15, thresholds={0.1: 0.6, 0.2: 0.7, 0.3: 0.8, 0.4: 0.9, 0.5: 0.95}),
        LengthClass(max_words=math.inf, thresholds={0.1: 0.9}),
    )
)
_ALL = (5, 10, 15, 20, 25)


def _select(*candidates: Candidate, words: int = 5, steps: int = 50, latest: int = 50) -> list[tuple[int, int, bool]]:
    found = select_latents(candidates, profile=_PROFILE, words=words, steps=steps, latest=latest)
    return [(selection.number, selection.step, selection.hole) for selection in found]


def _candidate(number: int, similarity: float, steps: tuple[int, ...] = _ALL, hits: int = 0) -> Candidate:
    return Candidate(number=number, noise=number, similarity=similarity, steps=steps, hits=hits)


@pytest.mark.parametrize(
    ("similarity", "step"), [(0.59, 0), (0.6, 5), (0.7, 10), (0.89, 15), (0.9, 20), (0.95, 25), (1.0, 25)]
)
def test_similarity_says_how_many_steps_are_skipped(similarity: float, step: int) -> None:
    assert _select(_candidate(1, similarity)) == ([(1, step, False)] if step else [])


def test_the_length_of_the_prompt_says_which_thresholds_count() -> None:
    assert _select(_candidate(1, 0.96), words=16) == [(1, 5, False)]
    assert _select(_candidate(1, 0.89), words=16) == []


def test_a_hole_is_served_by_the_largest_below() -> None:
    assert _select(_candidate(1, 0.92, (5, 15, 25))) == [(1, 15, True)]
    assert _select(_candidate(1, 0.92, (25,))) == []


def test_most_steps_come_first_and_of_equal_ones_the_most_similar() -> None:
    candidates = (_candidate(1, 0.99, (5,)), _candidate(2, 0.91), _candidate(3, 0.93), _candidate(4, 0.3))
    assert _select(*candidates) == [(3, 20, False), (2, 20, False), (1, 5, True)]


def test_of_equally_similar_ones_the_one_that_was_started_from_least_comes_first() -> None:
    # Of the same prompt, whose cosines differ in the last bits.
    candidates = (_candidate(1, 1.0, hits=2), _candidate(2, 0.9999999, hits=1), _candidate(3, 0.99, hits=0))
    assert [number for number, _, _ in _select(*candidates)] == [2, 1, 3]


def test_no_latent_is_later_than_it_may_be_and_that_is_no_hole() -> None:
    assert _select(_candidate(1, 0.99), latest=12) == [(1, 10, False)]
    assert _select(_candidate(1, 0.99, (5, 15)), latest=12) == [(1, 5, True)]
    assert _select(_candidate(1, 0.99), latest=4) == []


def test_a_similarity_that_is_no_number_is_never_enough() -> None:
    assert _select(_candidate(1, math.nan)) == []


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 1000, 1000), (1.0, 0, 0), (0.25, 700, 800)])
def test_a_share_of_hits_is_explored(share: float, least: int, most: int) -> None:
    exploration = Exploration(share, seed=1)
    assert least <= sum(exploration.kept(1) for _ in range(1000)) <= most
    assert least <= exploration.kept(1000) <= most
