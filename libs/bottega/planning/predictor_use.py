"""Whether a match predictor is worth asking: what it saves in look-ups against what it loses in hits. Plain Python.

A match predictor says, before an index is searched, whether the search will find anything. Where it is right about a
miss, a search is saved; where it is wrong about a hit, the steps of that hit are computed in vain.
Source: Nirvana (NSDI'24), section 5.2; the rule is ours: the paper has its predictor on always.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HALF_LIFE = 1000
"""Look-ups in which what was measured loses half of its weight."""

PROBE_EVERY = 20
"""Of the look-ups that the predictor would spare, one in so many is made, to see whether it is right."""

LEAST_LOOKUPS = 200
"""Before so many were measured, the predictor is not believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorRates:
    """What was measured of late.

    hit_rate: of all look-ups, those that find something. recall: of those, the share that was predicted.
    specificity: of the others, the share that was predicted. precision: of the predicted hits, those that were.
    Each is in 0 to 1, and 0 where there was none to count. lookup_s: seconds of a look-up, less those of a prediction.
    saved_s: seconds that a hit saves.
    """

    hit_rate: float
    recall: float
    specificity: float
    precision: float
    lookup_s: float
    saved_s: float

    @property
    def gain_s(self) -> float:
        """Seconds a question that the predictor saves in searches."""
        return (1.0 - self.hit_rate) * self.specificity * self.lookup_s

    @property
    def loss_s(self) -> float:
        """Seconds a question that it loses in hits."""
        return self.hit_rate * (1.0 - self.recall) * self.saved_s

    @property
    def pays(self) -> bool:
        """Whether a predictor with these rates should be on."""
        return self.gain_s > self.loss_s


@dataclass(slots=True)
class PredictorSwitch:
    """Has the predictor on while it pays, and goes on measuring it in both states. Not thread-safe.

    For each question: `weight = switch.weight(predicted_hit)`; where it is 0, there is no search and the answer is a
    miss; else search, and tell with `record(weight, ...)`. Off, every question is searched; on, those with a predicted
    hit and one in PROBE_EVERY of the others, which then counts for all of them: so rates stay unbiased.
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
        """What was measured of late."""
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
        """Whether the predictor's word counts now. Not where nobody said what hits save: lost ones would be free."""
        hits = self._predicted_hits + self._missed_hits
        seen = hits + self._false_alarms + self._predicted_misses
        known = self._hits > 0.0 or hits == 0.0
        return seen >= self.least_lookups and known and self.rates.pays

    def weight(self, predicted_hit: bool) -> float:
        """Whether to search (more than 0), and for how many questions this one then counts."""
        if predicted_hit or not self.on:
            return 1.0
        self._spared = (self._spared + 1) % self.probe_every
        return float(self.probe_every) if self._spared == 0 else 0.0

    def record(
        self, weight: float, *, predicted_hit: bool, hit: bool, lookup_s: float, saved_s: float | None = None
    ) -> None:
        """What a search found. lookup_s: what it took. saved_s: what its hit saves; None where that is not known."""
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
