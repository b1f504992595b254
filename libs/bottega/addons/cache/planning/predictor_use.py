"""Decides whether a match predictor saves more time in searches than it costs in lost hits. Plain Python.

A match predictor predicts whether a search of an index will find anything. A correctly predicted miss saves a search. A
wrongly predicted miss loses a hit: the request computes the steps that the hit would have saved.
Source: Nirvana (NSDI'24), section 5.2. The paper always uses its predictor; the rule here is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
