"""How many steps a cached latent may replace, by the similarity of two prompts and the model's measured thresholds.

Source: Nirvana (NSDI'24), section 5.3 and Algorithm 2. A profile here is for one fidelity.

`PredictorSwitch` decides whether a cache uses its match predictor, which predicts if a search will find anything. A
correctly predicted miss saves a search. A wrongly predicted miss loses a hit, and the request computes the steps that
the hit would have saved. Source: Nirvana, section 5.2. The paper always uses its predictor; the rule here is ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bottega.addons.cache.starts import FRACTIONS, recorded_steps, split_words

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

    The fractions are among bottega.addons.cache.starts.FRACTIONS. A missing fraction is never skipped. Thresholds
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


HALF_LIFE = 1000
"""Number of lookups after which the weight of a measurement halves."""

PROBE_EVERY = 20
"""One in this many predicted misses is searched for anyway, to check the predictor."""

LEAST_LOOKUPS = 200
"""Minimum number of measured lookups before the predictor is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorRates:
    """Recently measured rates, each in [0, 1]; 0 if there was nothing to count."""

    hit_rate: float
    """Share of lookups that find something."""
    recall: float
    """Share of the hits that were predicted as hits."""
    specificity: float
    """Share of the misses that were predicted as misses."""
    precision: float
    """Share of the predicted hits that were hits."""
    lookup_s: float
    """Seconds of a lookup minus the seconds of a prediction."""
    saved_s: float
    """Seconds of computation that a hit saves."""

    @property
    def gain_s(self) -> float:
        """Seconds per request that the predictor saves, because there is no search for predicted misses."""
        return (1.0 - self.hit_rate) * self.specificity * self.lookup_s

    @property
    def loss_s(self) -> float:
        """Seconds per request that the predictor loses, because some hits are mispredicted as misses."""
        return self.hit_rate * (1.0 - self.recall) * self.saved_s

    @property
    def pays(self) -> bool:
        """Whether the predictor saves more time than it costs."""
        return self.gain_s > self.loss_s


@dataclass(slots=True)
class PredictorSwitch:
    """Turns the predictor on while it saves time, and measures it in both states. Not thread-safe.

    For each request, call `weight(predicted_hit)`. If it is 0, treat the request as a miss without a search; otherwise
    search, and call `record(weight, ...)`. While the switch is off, there is a search for every request. While it is
    on, there is one for predicted hits and for one in PROBE_EVERY predicted misses; that one has the weight of all of
    them, which keeps the rates unbiased.
    """

    half_life: float = HALF_LIFE
    probe_every: int = PROBE_EVERY
    least_lookups: float = LEAST_LOOKUPS
    _predicted_hits: float = field(default=0.0, init=False)
    _missed_hits: float = field(default=0.0, init=False)
    _false_alarms: float = field(default=0.0, init=False)
    _predicted_misses: float = field(default=0.0, init=False)
    _lookups: float = field(default=0.0, init=False)
    _lookup_s: float = field(default=0.0, init=False)
    _hits: float = field(default=0.0, init=False)
    _saved_s: float = field(default=0.0, init=False)
    _spared: int = field(default=0, init=False)

    @property
    def rates(self) -> PredictorRates:
        """Rates over recent lookups."""
        hits = self._predicted_hits + self._missed_hits
        misses = self._false_alarms + self._predicted_misses
        return PredictorRates(
            hit_rate=_share(hits, hits + misses),
            recall=_share(self._predicted_hits, hits),
            specificity=_share(self._predicted_misses, misses),
            precision=_share(self._predicted_hits, self._predicted_hits + self._false_alarms),
            lookup_s=_share(self._lookup_s, self._lookups),
            saved_s=_share(self._saved_s, self._hits),
        )

    @property
    def on(self) -> bool:
        """Whether predictions are used now.

        They are not while the savings of hits are unknown, because lost hits would then seem to cost nothing.
        """
        hits = self._predicted_hits + self._missed_hits
        seen = hits + self._false_alarms + self._predicted_misses
        known = self._hits > 0.0 or hits == 0.0
        return seen >= self.least_lookups and known and self.rates.pays

    def weight(self, predicted_hit: bool) -> float:
        """Return 0 to skip the search, else the number of requests that this search stands for."""
        if predicted_hit or not self.on:
            return 1.0
        self._spared = (self._spared + 1) % self.probe_every
        return float(self.probe_every) if self._spared == 0 else 0.0

    def record(
        self, weight: float, *, predicted_hit: bool, hit: bool, lookup_s: float, saved_s: float | None = None
    ) -> None:
        """Record the result of a search.

        Args:
            weight: The result of `weight`.
            lookup_s: Seconds that the search took.
            saved_s: Seconds of computation that the hit saves; None if unknown.
        """
        kept = 0.5 ** (weight / self.half_life)
        self._predicted_hits = kept * self._predicted_hits + weight * (predicted_hit and hit)
        self._missed_hits = kept * self._missed_hits + weight * (hit and not predicted_hit)
        self._false_alarms = kept * self._false_alarms + weight * (predicted_hit and not hit)
        self._predicted_misses = kept * self._predicted_misses + weight * (not predicted_hit and not hit)
        self._lookups = kept * self._lookups + 1.0
        self._lookup_s = kept * self._lookup_s + lookup_s
        if hit and saved_s is not None:
            self._hits = kept * self._hits + 1.0
            self._saved_s = kept * self._saved_s + saved_s


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0.0 else 0.0
