"""Pairs of prompts to measure with: those of a file, in the order in which people sent them, or of the miniature."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bottega.latents import has_enough_words

# How many refinements the second prompt is away from the first: mostly one, as in a session, and seldom so many that
# little is left in common.
_REFINEMENTS = (1, 1, 1, 2, 2, 3, 4, 8)

EMBEDDED_MODEL = "miniature"
"""What it is called, if not otherwise: the only one whose prompts are known here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """Two prompts; the second one's pictures start from latents of the first one's."""

    first: str
    second: str


def pairs_of_file(text: str) -> list[PromptPair]:
    """Return a pair for each two neighbouring lines that differ; every line is a prompt.

    An empty line separates people: no pair spans it. Prompts with too few words to be recorded make no pairs.
    """
    pairs = pairwise(line.strip() for line in text.splitlines())
    return [
        PromptPair(first=one, second=other)
        for one, other in pairs
        if one != other and has_enough_words(one) and has_enough_words(other)
    ]


def miniature_pairs(count: int, *, seed: int = 0) -> list[PromptPair]:
    """Return `count` pairs in the embedded model's grammar: a scene, and the same scene after one to eight refinements.

    Half of the scenes have one thing and half have two. Half of the latter use the long sentence of more than 15 words.
    The first pairs of a seed are the same for every count.
    """
    rng = random.Random(seed)
    return [_miniature_pair(number, rng) for number in range(count)]


def thin_out(pairs: Sequence[PromptPair], most: int) -> list[PromptPair]:
    """Return at most `most` of the pairs, spread evenly over all."""
    if len(pairs) <= most:
        return list(pairs)
    return [pairs[number * len(pairs) // most] for number in range(most)]


def _miniature_pair(number: int, rng: random.Random) -> PromptPair:
    from bottega.miniature.scenes import caption, placed_caption, random_scene, refine

    say = placed_caption if number % 4 == 3 else caption
    first = random_scene(rng, things=1 + number % 2)
    second = first
    for _ in range(rng.choice(_REFINEMENTS)):
        second = refine(second, rng)
    while second == first:
        second = refine(second, rng)
    return PromptPair(first=say(first), second=say(second))
