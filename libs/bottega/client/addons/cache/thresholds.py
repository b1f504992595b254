"""The profile that samples say, as a cache keeps it, and what it means for the pairs that it was made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from bottega.client.addons.cache.samples import PairSample
from bottega.latents.names import FRACTIONS
from bottega.planning import BALANCED_ALPHA, FAST_ALPHA, LengthClass, QualitySample, SkipProfile, measured_class
from bottega.planning.skip_profile import SHORT_WORDS
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile

ALPHAS: Mapping[str, float] = {"balanced": BALANCED_ALPHA, "fast": FAST_ALPHA}
"""By fidelity, the share of an uncached picture's quality that a cached one has to exceed."""

_CLASSES = (float(SHORT_WORDS), math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The effect of a profile on the pairs that it was made of."""

    pairs: int
    shares: Mapping[float, float]
    """Share of the pairs that start after each fraction of the steps. The other pairs are drawn from noise."""
    uncached: float
    """Mean quality of the pairs that start, when drawn from noise; 0 if no pair starts."""
    cached: float
    """Their mean quality when drawn as the profile says; 0 if no pair starts."""


def skip_profile(samples: Sequence[PairSample], alpha: float) -> SkipProfile:
    """Return the thresholds by length of the prompt; prompts shorter or longer than all measured ones have none.

    A class in which nothing may be skipped is left out, unless a longer one follows.
    """
    fewest = min((sample.words for sample in samples), default=0)
    most = max((sample.words for sample in samples), default=0)
    classes = [LengthClass(max_words=fewest - 1, thresholds={})] if fewest > 1 else []
    for bound in _CLASSES:
        least = classes[-1].max_words if classes else 0
        of_class = [sample for sample in samples if least < sample.words <= bound]
        if of_class:
            classes.append(measured_class(min(bound, most), _by_fraction(of_class), alpha=alpha))
    while classes and not classes[-1].thresholds:
        classes.pop()
    return SkipProfile(classes=tuple(classes))


def profile_message(model_hash: str, samples: Sequence[PairSample], about: str) -> CacheProfile:
    """Return the profile of both fidelities. A class without thresholds says that nothing may be reused."""
    profile = CacheProfile(model_hash=model_hash, about=about)
    profile.balanced.extend(_messages(skip_profile(samples, BALANCED_ALPHA)))
    profile.fast.extend(_messages(skip_profile(samples, FAST_ALPHA)))
    if not profile.balanced and not profile.fast:
        profile.balanced.add()
    return profile


def use_of(profile: SkipProfile, samples: Sequence[PairSample]) -> Use:
    """Return the effect of a profile on these pairs."""
    starts = [(sample, fraction) for sample in samples if (fraction := _fraction(profile, sample))]
    return Use(
        pairs=len(samples),
        shares={each: sum(fraction == each for _, fraction in starts) / len(samples) for each in FRACTIONS},
        uncached=mean(sample.uncached for sample, _ in starts) if starts else 0.0,
        cached=mean(sample.cached[fraction] for sample, fraction in starts) if starts else 0.0,
    )


def _by_fraction(samples: Sequence[PairSample]) -> Mapping[float, list[QualitySample]]:
    return {
        fraction: [
            QualitySample(similarity=each.similarity, cached=each.cached[fraction], uncached=each.uncached)
            for each in samples
            if fraction in each.cached
        ]
        for fraction in FRACTIONS
        if any(fraction in each.cached for each in samples)
    }


def _fraction(profile: SkipProfile, sample: PairSample) -> float:
    """Return the fraction of the steps after which the sample's pictures start; 0 if they do not."""
    allowed = (
        fraction
        for fraction, least in profile.thresholds(sample.words).items()
        if sample.similarity >= least and fraction in sample.cached
    )
    return max(allowed, default=0.0)


def _messages(profile: SkipProfile) -> Iterator[CacheLengthClass]:
    for each in profile.classes:
        yield _message(each)


def _message(length_class: LengthClass) -> CacheLengthClass:
    bounded = math.isfinite(length_class.max_words)
    message = CacheLengthClass(max_words=int(length_class.max_words) if bounded else 0)
    for fraction, similarity in length_class.thresholds.items():
        message.thresholds.add(fraction=fraction, similarity=similarity)
    return message
