"""How many steps a cached latent may replace, by the similarity of two prompts and the model's measured thresholds.

Source: Nirvana (NSDI'24), section 5.3 and Algorithm 2. A profile here is for one fidelity.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bottega.addons.cache.wire.prompt_words import split_words
from bottega.addons.cache.wire.starts import FRACTIONS, recorded_steps

BALANCED_ALPHA = 0.9
"""Share of the uncached picture's quality that a picture must exceed with fidelity balanced (Nirvana's alpha)."""

FAST_ALPHA = 0.8
"""The same share with fidelity fast."""

SHARE = 0.95
"""Share of the pictures started from a latent that must exceed that quality."""

LEAST_SAMPLES = 20
"""Minimum number of samples.

With fewer, a single bad picture is more than a twentieth, so that a share of .95 means nothing."""

SHORT_WORDS = 15
"""Length, in words, up to which Nirvana's thresholds hold. In longer prompts a changed word hardly affects
similarity."""

# Steps are whole and their fractions are not. A step belongs to a fraction that is at most this far away.
_MOST_ROUNDING = 0.05 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthClass:
    """Thresholds for prompts of at most `max_words` words; `max_words` may be math.inf."""

    max_words: float
    thresholds: Mapping[float, float]
    """Minimum cosine between two prompts' embeddings, in [-1, 1], by the fraction of the steps that is skipped.

    The fractions are among bottega.addons.cache.wire.starts.FRACTIONS. A missing fraction is never skipped. Thresholds
    never fall as the fraction grows, because a latent that may replace more steps may also replace fewer."""

    def __post_init__(self) -> None:
        """Raise ValueError if the thresholds are invalid."""
        if not self.max_words >= 1:
            raise ValueError(f"max_words of a class must be at least 1; got {self.max_words}")
        strange = [fraction for fraction in self.thresholds if fraction not in FRACTIONS]
        if strange:
            raise ValueError(f"latents are recorded after {FRACTIONS} of the steps, not after {strange[0]}")
        similarities = [self.thresholds[fraction] for fraction in sorted(self.thresholds)]
        if not all(-1.0 <= similarity <= 1.0 for similarity in similarities):
            raise ValueError("a similarity must be a cosine, from -1 to 1")
        if any(more < less for less, more in pairwise(similarities)):
            raise ValueError("a longer skip needs at least the similarity of a shorter one")


@dataclass(frozen=True, slots=True, kw_only=True)
class SkipProfile:
    """Classes in ascending order of prompt length. A prompt belongs to the first class that covers its length."""

    classes: tuple[LengthClass, ...]

    def __post_init__(self) -> None:
        """Raise ValueError if the classes are not in ascending order."""
        if any(later.max_words <= earlier.max_words for earlier, later in pairwise(self.classes)):
            raise ValueError("classes must be in ascending order of max_words")

    def thresholds(self, words: int) -> Mapping[float, float]:
        """Return the thresholds for a prompt of `words` words; empty if it belongs to no class."""
        return next((length_class.thresholds for length_class in self.classes if words <= length_class.max_words), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class QualitySample:
    """A prompt that was drawn both from a cached latent and from noise.

    Both qualities use one measure, of which more is better (1 and 0 for right and wrong, or a CLIP score).
    """

    similarity: float
    """Cosine between the embeddings of this prompt and of the latent's prompt."""
    cached: float
    """Quality of the picture from the cached latent."""
    uncached: float
    """Quality of the picture from noise."""

    def good(self, alpha: float) -> bool:
        """Return whether the cached picture's quality exceeds alpha times the uncached one's, or is no worse.

        The second condition matters if the uncached picture has quality 0: then 0 does not exceed alpha times 0.
        """
        return self.cached > alpha * self.uncached or self.cached >= self.uncached


NIRVANA_768 = SkipProfile(
    classes=(
        LengthClass(max_words=SHORT_WORDS, thresholds=dict(zip(FRACTIONS, (0.65, 0.75, 0.85, 0.9, 0.95), strict=True))),
    )
)
"""Nirvana's own thresholds, for CLIP text embeddings of width 768 and prompts of at most SHORT_WORDS words."""


def fallback_profile(width: int) -> SkipProfile | None:
    """Return the profile of an unmeasured model, by the width of its embeddings; None if nothing may be reused."""
    return NIRVANA_768 if width == 768 else None


def count_words(prompt: str) -> int:
    """Return the number of words of a prompt."""
    return len(split_words(prompt))


def skip_steps(profile: SkipProfile, *, similarity: float, words: int, steps: int) -> tuple[int, ...]:
    """Return the steps whose recorded latents may be used for a job, the largest first; empty if none may.

    Args:
        similarity: Cosine between the two prompts' embeddings, in [-1, 1]; NaN never suffices.
        words: Words of the new prompt.
        steps: Denoising steps of both prompts' jobs.
    """
    thresholds = profile.thresholds(words)
    return tuple(
        step
        for step in reversed(recorded_steps(steps))
        if similarity >= thresholds.get(fraction_of(step, steps), math.inf)
    )


def skip_step(profile: SkipProfile, *, similarity: float, words: int, steps: int) -> int:
    """Return the largest of skip_steps, which is Nirvana's K; 0 if there is none."""
    return next(iter(skip_steps(profile, similarity=similarity, words=words, steps=steps)), 0)


def served_step(allowed: Sequence[int], present: Collection[int]) -> int:
    """Return the largest allowed step whose latent is still present; 0 if there is none.

    If the latent of a larger step was evicted (a hole), the next one below it is used.

    Args:
        allowed: The result of skip_steps.
    """
    return next((step for step in allowed if step in present), 0)


def least_similarity(samples: Sequence[QualitySample], *, alpha: float, share: float = SHARE) -> float | None:
    """Return the lowest similarity that allows to skip K steps (Nirvana's Algorithm 2); None if none does.

    It is the lowest s* such that at least LEAST_SAMPLES samples have similarity s* or more, and the share `share` of
    them is good. s* is one of the samples' similarities. The paper's pseudo-code uses the lowest similarity of a good
    picture instead, above which there may be bad ones. Its text demands that all above are good, which one bad picture
    in thousands prevents.

    Args:
        samples: Samples of one K and one class of prompts.
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
    """Return the thresholds of a class of prompts, computed from samples by fraction of the steps.

    A fraction for which no similarity suffices is omitted, and so are all larger ones. If by chance a larger fraction
    has a lower threshold than a smaller one, both get the same.
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
    """Return the fraction nearest to a recorded step, the larger of two equally near ones; NaN if none is near."""
    nearest = min(reversed(FRACTIONS), key=lambda fraction: round(abs(step / steps - fraction), 9))
    return nearest if abs(step / steps - nearest) <= _MOST_ROUNDING else math.nan
