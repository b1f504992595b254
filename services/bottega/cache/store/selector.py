"""Which latents a job's pictures start from, of those whose prompts are similar to its own. Knows no files."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.planning.skip_profile import SkipProfile, served_step, skip_steps

# Of a similarity: of one prompt's embeddings, in single precision, cosines differ from 1 by less.
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An entry that a search has found."""

    number: int
    noise: int
    """What noise the entry began with: its seed."""
    similarity: float
    """Cosine of the embeddings of the two prompts."""
    steps: Collection[int]
    """Steps after which the entry has latents."""
    hits: int = 0
    """How often pictures have started from the entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """A latent that may be started from."""

    number: int
    noise: int
    """What noise the entry began with: its seed."""
    similarity: float
    """Cosine of the embeddings of the two prompts."""
    step: int
    """Number of steps after which the latent was recorded."""
    hole: bool
    """Whether the similarity allows for more steps, whose latent was evicted."""


class Selector(Protocol):
    """Decides by similarity."""

    def select(
        self, candidates: Sequence[Candidate], *, profile: SkipProfile, words: int, steps: int, latest: int
    ) -> list[Selection]:
        """At most one latent of each candidate, the best first.

        words: of the new prompt. steps: of the job. latest: after which the latents are, at most.
        """
        ...


class MostStepsSelector:
    """The latent that saves most steps goes first, of equal ones that of the most similar prompt, of equally similar
    ones the one that was started from least: so that not all pictures of one prompt begin alike.

    Each of them is similar enough for its steps, as the profile says.
    """

    def select(
        self, candidates: Sequence[Candidate], *, profile: SkipProfile, words: int, steps: int, latest: int
    ) -> list[Selection]:
        """At most one latent of each candidate, that of the most steps first. See Selector.select."""
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
    """The best first."""
    selection, hits = found
    return (-selection.step, -round(selection.similarity, _DIGITS), hits, selection.number)


class Exploration:
    """Has a share of the hits drawn from noise, so that what is recorded, and what people see, stays various."""

    def __init__(self, share: float, seed: int | None) -> None:
        self._share = share
        self._random = random.Random(seed)

    def kept(self, hits: int) -> int:
        """How many of so many hits are served."""
        return sum(self._random.random() >= self._share for _ in range(hits))
