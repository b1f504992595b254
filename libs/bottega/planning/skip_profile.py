"""How many steps a cached latent may replace: from the similarity of two prompts, by what was measured for the model.

Source: Nirvana (NSDI'24), section 5.3 and Algorithm 2. Plain numbers; a profile here is that of one fidelity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bottega.latents.names import FRACTIONS, recorded_steps

BALANCED_ALPHA = 0.9
"""Of the uncached picture's quality, what a picture has to exceed (Nirvana's alpha)."""

FAST_ALPHA = 0.8
"""The same where speed counts more."""

SHARE = 0.95
"""Of the pictures that start from a latent, those that have to be good enough."""

LEAST_SAMPLES = 20
"""With fewer pictures, one that is bad is more than a twentieth: a share of .95 says nothing."""

SHORT_WORDS = 15
"""Words up to which similarity was found to say enough; in longer prompts one changed word hardly shows in it."""

# Steps are whole and fractions of them are not: a step belongs to a fraction that is no farther from it.
_MOST_ROUNDING = 0.05 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClass:
    """Thresholds for prompts of at most so many words; math.inf is without bound.

    thresholds: the least cosine of two prompts' embeddings, in [-1, 1], by the fraction of the steps that is skipped
    (of bottega.latents.names.FRACTIONS). A fraction that is not named is never skipped. They never fall with the
    fraction: what may stand for more steps may stand for fewer.
    """

    max_words: float
    thresholds: Mapping[float, float]

    def __post_init__(self) -> None:
        """Raises ValueError where the thresholds are none."""
        if not self.max_words >= 1:
            raise ValueError(f"a class has prompts of at least one word; got {self.max_words}")
        strange = [fraction for fraction in self.thresholds if fraction not in FRACTIONS]
        if strange:
            raise ValueError(f"latents are recorded after {FRACTIONS} of the steps, not after {strange[0]}")
        similarities = [self.thresholds[fraction] for fraction in sorted(self.thresholds)]
        if not all(-1.0 <= similarity <= 1.0 for similarity in similarities):
            raise ValueError("a similarity is a cosine, -1 to 1")
        if any(more < less for less, more in pairwise(similarities)):
            raise ValueError("a longer skip needs at least the similarity of a shorter one")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipProfile:
    """Classes by length, ascending; a prompt belongs to the first that has room for it, or to none."""

    classes: tuple[LengthClass, ...]

    def __post_init__(self) -> None:
        """Raises ValueError where the classes do not ascend."""
        if any(later.max_words <= earlier.max_words for earlier, later in pairwise(self.classes)):
            raise ValueError("classes stand in ascending order of their words")

    def thresholds(self, words: int) -> Mapping[float, float]:
        """Those for a prompt of so many words; empty where it belongs to no class."""
        return next((each.thresholds for each in self.classes if words <= each.max_words), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySample:
    """One prompt, drawn from a cached latent and from noise.

    similarity: cosine of its embedding and that of the latent's prompt. cached, uncached: quality of the two pictures
    by one measure, of which more is better (1 and 0 of the oracle, a CLIP score).
    """

    similarity: float
    cached: float
    uncached: float

    def good(self, alpha: float) -> bool:
        """Whether the cached picture is above alpha times the uncached one, or no worse than it.

        The second matters where the uncached picture is all wrong: what is 0 is not above alpha times 0.
        """
        return self.cached > alpha * self.uncached or self.cached >= self.uncached


NIRVANA_768 = SkipProfile(
    classes=(
        LengthClass(max_words=SHORT_WORDS, thresholds=dict(zip(FRACTIONS, (0.65, 0.75, 0.85, 0.9, 0.95), strict=True))),
    )
)
"""Nirvana's own thresholds, for CLIP text embeddings 768 wide, and for prompts in which similarity says enough."""


def fallback_profile(width: int) -> SkipProfile | None:
    """What counts for a model that was not measured, by the width of its embeddings; None: nothing is reused."""
    return NIRVANA_768 if width == 768 else None


def count_words(prompt: str) -> int:
    """Words of a prompt: what is between spaces."""
    return len(prompt.split())


def skip_steps(profile: SkipProfile, *, similarity: float, words: int, steps: int) -> tuple[int, ...]:
    """After how many of a job's steps a latent may have been recorded to be used for it, the largest first.

    similarity: cosine of the two prompts' embeddings, in [-1, 1]; NaN is never enough. words: of the new prompt.
    steps: denoising steps of the job (both prompts'). Empty where the latent must not be used.
    """
    thresholds = profile.thresholds(words)
    return tuple(
        step
        for step in reversed(recorded_steps(steps))
        if similarity >= thresholds.get(fraction_of(step, steps), math.inf)
    )


def skip_step(profile: SkipProfile, *, similarity: float, words: int, steps: int) -> int:
    """The largest of skip_steps, 0 where there is none: Nirvana's K."""
    return next(iter(skip_steps(profile, similarity=similarity, words=words, steps=steps)), 0)


def served_step(allowed: Sequence[int], present: Collection[int]) -> int:
    """Which of an entry's latents is used: the largest that is allowed and still there; 0 where there is none.

    allowed: skip_steps' answer. Where the largest allowed one was evicted (a hole), the next below it serves.
    """
    return next((step for step in allowed if step in present), 0)


def least_similarity(samples: Sequence[QualitySample], *, alpha: float, share: float = SHARE) -> float | None:
    """From which similarity on latents after some K may be used (Nirvana's Algorithm 2).

    The least s* such that of the samples with similarity at least s* the share `share` is good, of LEAST_SAMPLES or
    more; it is one of the samples' similarities. None where there is no such s*: this K is then never used.
    The paper's pseudo-code takes the least similarity of a good picture instead, which bad ones may be above; its text
    demands that all above are good, which one bad picture in thousands forbids.
    samples: of one K and one class of prompts.
    """
    least: float | None = None
    good = 0
    ordered = sorted(samples, key=lambda sample: -sample.similarity)
    for seen, sample in enumerate(ordered, start=1):
        good += sample.good(alpha)
        last_of_equals = seen == len(ordered) or ordered[seen].similarity < sample.similarity
        if last_of_equals and seen >= LEAST_SAMPLES and good >= share * seen:
            least = sample.similarity
    return least


def measured_class(
    max_words: float, samples: Mapping[float, Sequence[QualitySample]], *, alpha: float, share: float = SHARE
) -> LengthClass:
    """The thresholds that samples, by fraction of the steps, say for a class of prompts.

    A fraction whose samples allow no similarity is left out, and all larger ones with it. Where chance makes a longer
    skip look easier than a shorter one, it needs as much as that.
    """
    thresholds: dict[float, float] = {}
    highest = -1.0
    for fraction in sorted(samples):
        least = least_similarity(samples[fraction], alpha=alpha, share=share)
        if least is None:
            break
        highest = max(highest, min(least, 1.0))
        thresholds[fraction] = highest
    return LengthClass(max_words=max_words, thresholds=thresholds)


def fraction_of(step: int, steps: int) -> float:
    """The fraction to which a recorded step belongs: the nearest, of two the larger; NaN where it is too far."""
    nearest = min(reversed(FRACTIONS), key=lambda fraction: round(abs(step / steps - fraction), 9))
    return nearest if abs(step / steps - nearest) <= _MOST_ROUNDING else math.nan
