"""Decides whether a match predictor saves more time in searches than it costs in lost hits. Plain Python.

A match predictor predicts whether a search of an index will find anything. A correctly predicted miss saves a search. A
wrongly predicted miss loses a hit: the request computes the steps that the hit would have saved.
Source: Nirvana (NSDI'24), section 5.2. The paper always uses its predictor; the rule here is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

HALF_LIFE = 1000
"""Number of look-ups after which a measurement has half of its weight."""

PROBE_EVERY = 20
"""Of the look-ups that the predictor would skip, one in this many is made, to check whether it is right."""

LEAST_LOOKUPS = 200
"""The predictor is not used before this many look-ups were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorRates:
    """Recently measured rates, each in [0, 1], and 0 if there was nothing to count."""

    hit_rate: float
    """Share of look-ups that find something."""
    recall: float
    """Share of the hits that were predicted."""
    specificity: float
    """Share of the misses that were predicted."""
    precision: float
    """Share of the predicted hits that were hits."""
    lookup_s: float
    """Seconds of a look-up, less those of a prediction."""
    saved_s: float
    """Seconds that a hit saves."""

    @property
    def gain_s(self) -> float:
        """Seconds per request that the predictor saves, because predicted misses are not searched for."""
        return (1.0 - self.hit_rate) * self.specificity * self.lookup_s

    @property
    def loss_s(self) -> float:
        """Seconds per request that the predictor loses, because some hits are mispredicted as misses."""
        return self.hit_rate * (1.0 - self.recall) * self.saved_s

    @property
    def pays(self) -> bool:
        """Whether a predictor with these rates should be on."""
        return self.gain_s > self.loss_s


@dataclass(slots=True)
class PredictorSwitch:
    """A switch that turns the predictor on while it pays, and measures it in both states. Not thread-safe.

    For each request, call `weight(predicted_hit)`. If it is 0, answer with a miss without a search; otherwise search,
    and call `record(weight, ...)`. While the switch is off, every request is searched for. While it is on, predicted
    hits are searched for, and so is one in PROBE_EVERY of the predicted misses. That one counts for all of them, which
    keeps the rates unbiased.
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
        """Recently measured rates."""
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

        While the savings of hits are unknown, they are not used, because lost hits would seem to cost nothing.
        """
        hits = self._predicted_hits + self._missed_hits
        seen = hits + self._false_alarms + self._predicted_misses
        known = self._hits > 0.0 or hits == 0.0
        return seen >= self.least_lookups and known and self.rates.pays

    def weight(self, predicted_hit: bool) -> float:
        """Return 0 to skip the search, or the number of requests for which this search counts."""
        if predicted_hit or not self.on:
            return 1.0
        self._spared = (self._spared + 1) % self.probe_every
        return float(self.probe_every) if self._spared == 0 else 0.0

    def record(
        self, weight: float, *, predicted_hit: bool, hit: bool, lookup_s: float, saved_s: float | None = None
    ) -> None:
        """Record the result of a search.

        Args:
            lookup_s: Duration of the search.
            saved_s: What its hit saves; None if unknown.
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
