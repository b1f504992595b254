"""Pairs of prompts for measuring a cache, files with measured pairs, and the thresholds computed from these."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean

from bottega.addons.cache.client.types import CacheProfile
from bottega.addons.cache.skip_profile import (
    BALANCED_ALPHA,
    FAST_ALPHA,
    SHORT_WORDS,
    LengthClass,
    QualitySample,
    SkipProfile,
    measured_class,
)
from bottega.addons.cache.starts import FRACTIONS, has_enough_words
from bottega.errors import InvalidRequest

# Numbers of refinements between the two prompts: mostly one, as in a session, and seldom so many that little is left in
# common.
_REFINEMENTS = (1, 1, 1, 2, 2, 3, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """Two prompts. The second is drawn from latents of the first."""

    first: str
    second: str


def pairs_of_file(text: str) -> list[PromptPair]:
    """Return a pair for each two adjacent lines that differ, where every line is a prompt.

    Empty lines separate the prompts of different people: no pair spans one. Prompts that are too short to be recorded
    make no pairs.
    """
    pairs = pairwise(line.strip() for line in text.splitlines())
    return [
        PromptPair(first=one, second=other)
        for one, other in pairs
        if one != other and has_enough_words(one) and has_enough_words(other)
    ]


def miniature_pairs(count: int, *, seed: int = 0) -> list[PromptPair]:
    """Return pairs of prompts for the embedded model: a scene, and the scene after one to eight refinements.

    Half of the scenes have one object and half have two. Half of the latter use the long sentence of more than 15
    words. The first pairs of a seed are the same for every count.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How pairs are measured. Samples that were measured differently are not mixed."""

    model_hash: str
    num_inference_steps: int
    draws: int
    """How often each pair is drawn, each time with other seeds."""
    judge: str
    """Display name of the scorer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSample:
    """The measurement of one pair of prompts."""

    first: str
    second: str
    words: int
    """Number of words in the second prompt."""
    similarity: float
    """Cosine between the embeddings of the two prompts."""
    uncached: float
    """Mean quality of the second prompt's pictures that were drawn from noise."""
    cached: Mapping[float, float]
    """Mean quality of pictures with the same seeds that started from the first prompt's latents, by the fraction of
    skipped steps."""

    @property
    def pair(self) -> PromptPair:
        return PromptPair(first=self.first, second=self.second)


class SampleFile:
    """A file to which samples are appended, so that an interrupted measurement can go on. Safe for several threads.

    The first line of the file is the method, every other line a sample.

    Args:
        path: The file; None keeps samples only in memory.
        method: The method of the measurement.

    Raises:
        InvalidRequest: The file belongs to another measurement, is no file of samples, or cannot be written.
    """

    def __init__(self, path: Path | None, method: Method) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.samples: list[PairSample] = []
        if path is None:
            return
        try:
            if path.exists() and path.stat().st_size:
                self.samples = _read(path, method)
            else:
                path.write_text(json.dumps(asdict(method)) + "\n", encoding="utf-8")
        except OSError as error:
            raise InvalidRequest(f"{path} can keep no samples: {error.strerror}; name another file") from None

    def add(self, sample: PairSample) -> None:
        with self._lock:
            self.samples.append(sample)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(sample)) + "\n")

    def missing(self, pairs: Iterable[PromptPair]) -> list[PromptPair]:
        """Return the pairs that have no sample."""
        known = {sample.pair for sample in self.samples}
        return [pair for pair in pairs if pair not in known]


def _read(path: Path, method: Method) -> list[PairSample]:
    try:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        lines = whole.splitlines()
        if json.loads(lines[0]) != asdict(method):
            raise InvalidRequest(f"{path} was measured in another way: {lines[0]}; name another file")
        samples = [_sample(line) for line in lines[1:]]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise InvalidRequest(f"{path} is no file of samples ({type(error).__name__}); name another one") from None
    if whole != text:  # its writer was killed within a line, so that pair is drawn again
        path.write_text(whole, encoding="utf-8")
    return samples


def _sample(line: str) -> PairSample:
    values = json.loads(line)
    cached = {float(fraction): float(quality) for fraction, quality in values.pop("cached").items()}
    if unknown := cached.keys() - set(FRACTIONS):
        raise ValueError(f"{unknown} is not one of the recorded fractions")
    return PairSample(**values, cached=cached)


ALPHAS: Mapping[str, float] = {"balanced": BALANCED_ALPHA, "fast": FAST_ALPHA}
"""Share of the uncached picture's quality that a picture from a cached latent must exceed, by fidelity."""

_CLASS_BOUNDS = (float(SHORT_WORDS), math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """The effect of a profile on the pairs from which it was computed."""

    pairs: int
    shares: Mapping[float, float]
    """Share of the pairs whose second picture skips each fraction of the steps. The other pairs are drawn from
    noise."""
    uncached: float
    """Mean quality, when drawn from noise, of the pairs that would start from a latent; 0 if there are none."""
    cached: float
    """Mean quality of the same pairs when they start from the latent that the profile allows; 0 if there are none."""


def skip_profile(samples: Sequence[PairSample], alpha: float) -> SkipProfile:
    """Return the thresholds by length of the prompt. Prompts shorter or longer than all measured ones get none.

    A class of lengths in which nothing may be skipped is omitted, unless a class of longer prompts follows.
    """
    fewest = min((sample.words for sample in samples), default=0)
    most = max((sample.words for sample in samples), default=0)
    classes = [LengthClass(max_words=fewest - 1, thresholds={})] if fewest > 1 else []
    for bound in _CLASS_BOUNDS:
        least = classes[-1].max_words if classes else 0
        of_class = [sample for sample in samples if least < sample.words <= bound]
        if of_class:
            classes.append(measured_class(min(bound, most), _by_fraction(of_class), alpha=alpha))
    while classes and not classes[-1].thresholds:
        classes.pop()
    return SkipProfile(classes=tuple(classes))


def measured_profile(model_hash: str, samples: Sequence[PairSample], about: str) -> CacheProfile:
    """Return the profile computed from samples, for both fidelities."""
    balanced, fast = skip_profile(samples, BALANCED_ALPHA), skip_profile(samples, FAST_ALPHA)
    if not balanced.classes and not fast.classes:  # a profile without any class would only forget the earlier one
        balanced = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds={}),))
    return CacheProfile(model_hash=model_hash, balanced=balanced, fast=fast, about=about)


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
    """Return the fraction of the steps that the profile lets the sample's pictures skip; 0 for none."""
    allowed = (
        fraction
        for fraction, least in profile.thresholds(sample.words).items()
        if sample.similarity >= least and fraction in sample.cached
    )
    return max(allowed, default=0.0)
