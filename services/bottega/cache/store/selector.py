"""Selects the latents from which a job's pictures start, among those of similar prompts. It does not access files."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bottega.addons.cache.planning.skip_profile import SkipProfile, served_step, skip_steps

# Decimals to which similarities are rounded. In float32 the cosine of equal embeddings differs from 1 by less.
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An entry that a search has found."""

    number: int
    noise: int
    """Seed of the entry, which identifies its initial noise."""
    similarity: float
    """Cosine of the embeddings of the two prompts."""
    steps: Collection[int]
    """Steps after which latents of the entry were recorded."""
    hits: int = 0
    """Number of pictures that have started from the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A latent from which a picture may start."""

    number: int
    noise: int
    """Seed of the entry, which identifies its initial noise."""
    similarity: float
    """Cosine of the embeddings of the two prompts."""
    step: int
    """Number of steps after which the latent was recorded."""
    hole: bool
    """Whether the similarity would allow a later latent, which was evicted."""


def select_latents(
    candidates: Sequence[Candidate], *, profile: SkipProfile, words: int, steps: int, latest: int
) -> list[Selection]:
    """Return at most one latent of each candidate, those that save most steps first.

    Among equal ones the most similar prompt comes first, then the least used entry, so that the pictures of one prompt
    do not all start from the same latent. Each latent is similar enough for its steps, according to the profile.

    Args:
        words: Number of words of the new prompt.
        steps: Number of steps of the job.
        latest: The last step after which a usable latent was recorded.
    """
    found: list[tuple[Selection, int]] = []
    for candidate in candidates:
        similar_enough = skip_steps(profile, similarity=candidate.similarity, words=words, steps=steps)
        allowed = [step for step in similar_enough if step <= latest]
        step = served_step(allowed, candidate.steps)
        if step:
            selection = Selection(
                number=candidate.number,
                noise=candidate.noise,
                similarity=candidate.similarity,
                step=step,
                hole=step != allowed[0],
            )
            found.append((selection, candidate.hits))
    return [selection for selection, _ in sorted(found, key=_order)]


def _order(found: tuple[Selection, int]) -> tuple[float, ...]:
    selection, hits = found
    return (-selection.step, -round(selection.similarity, _DIGITS), hits, selection.number)


class Exploration:
    """Chooses hits that are not used, so that new pictures are drawn from noise and results stay diverse."""

    def __init__(self, share: float, seed: int | None) -> None:
        self._share = share
        self._random = random.Random(seed)

    def kept(self, hits: int) -> int:
        """Return how many of `hits` hits are used."""
        return sum(self._random.random() >= self._share for _ in range(hits))
