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
"""Of an uncached picture's quality, what a cached one has to be above, by fidelity."""

_CLASSES = (float(SHORT_WORDS), math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a profile means for the pairs that it was made of.

    shares: of them, that start after each fraction of the steps; what is left is drawn from noise.
    uncached, cached: mean quality of those that start, drawn from noise and as the profile says; 0 where none does.
    """

    pairs: int
    shares: Mapping[float, float]
    uncached: float
    cached: float


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
    """For both fidelities. Where nothing may be reused, a class without thresholds says so: without one it is none."""
    profile = CacheProfile(model_hash=model_hash, about=about)
    profile.balanced.extend(_messages(skip_profile(samples, BALANCED_ALPHA)))
    profile.fast.extend(_messages(skip_profile(samples, FAST_ALPHA)))
    if not profile.balanced and not profile.fast:
        profile.balanced.add()
    return profile


def use_of(profile: SkipProfile, samples: Sequence[PairSample]) -> Use:
    """What it means for these pairs."""
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
    """After which the sample's pictures start; 0 where they do not."""
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
