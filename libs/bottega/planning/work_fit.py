"""Seconds as a function of floating-point operations and bytes: a regression over batches that ran, kept fresh.

Convolutions over feature maps run at another pace than attention and projections, so theirs are counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from statistics import fmean

MAX_BATCHES = 256
"""Kinds of batches that are remembered."""

# Batches whose operations and bytes differ by less than this are of one kind.
_KIND = 0.02
# Weight of a new measurement of a kind: a neighbour's hiccup is forgotten in a few turns.
_WEIGHT = 0.25
# Measurements of whatever kind after which one counts half: what the machine was then it may not be now.
_HALF_LIFE = 200
# Parts into which kinds are divided to be held out, one part after the other.
_PARTS = 5
_FEATURES = 4
# By how much, in shares of all that was measured, both paces of operations are held together: it decides as long as
# what ran does not tell them apart.
_ONE_PACE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCost:
    """seconds = per_flop_s * flops + per_map_flop_s * map_flops + per_byte_s * size_bytes + fixed_s; none is negative.

    map_flops: of convolutions over feature maps; flops: all others.
    """

    per_flop_s: float
    per_map_flop_s: float
    per_byte_s: float
    fixed_s: float

    def seconds(self, flops: float, size_bytes: float, map_flops: float = 0.0) -> float:
        """Of a batch."""
        computed_s = self.per_flop_s * flops + self.per_map_flop_s * map_flops
        return computed_s + self.per_byte_s * size_bytes + self.fixed_s


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A kind of batches: what its last one had, and its mean seconds.

    weight: measurements, as many as they counted for at the last one, which was the fit's `measured_at`-th.
    """

    flops: float
    map_flops: float
    size_bytes: float
    seconds: float
    weight: float
    measured_at: int

    def weight_at(self, measured: int) -> float:
        """After so many measurements of all kinds."""
        return self.weight * math.exp2((self.measured_at - measured) / _HALF_LIFE)


class WorkFit:
    """A least-squares fit without negative parts, over the kinds of batches measured so far; old ones count less.

    A kind is what has about the same operations and bytes: however often one runs, others are not forgotten for it. So
    what repeats itself moves the fit to what the machine does now, and what ran before says how it grows. Of more than
    MAX_BATCHES kinds, that which ran longest ago is forgotten.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[int, ...], _Batch] = {}
        self._measured = 0
        self._cost: WorkCost | None = None

    def observe(self, *, flops: float, size_bytes: float, seconds: float, map_flops: float = 0.0) -> None:
        """Takes in a batch that ran, see WorkCost. What is not finite, or took no time, changes nothing."""
        work = flops, map_flops, size_bytes
        if not (math.isfinite(sum(work) + seconds) and min(work) >= 0.0 < seconds):
            return
        self._measured += 1
        self._cost = None
        kind = tuple(map(_rounded, work))
        known = self._batches.pop(kind, None)  # the last one is the newest
        self._batches[kind] = _Batch(
            flops=flops,
            map_flops=map_flops,
            size_bytes=size_bytes,
            seconds=seconds if known is None else known.seconds + _WEIGHT * (seconds - known.seconds),
            weight=1.0 + (0.0 if known is None else known.weight_at(self._measured)),
            measured_at=self._measured,
        )
        if len(self._batches) > MAX_BATCHES:
            del self._batches[next(iter(self._batches))]

    @property
    def cost(self) -> WorkCost | None:
        """The fit; None before anything was measured."""
        if self._cost is None and self._batches:
            self._cost = self._fitted(list(self._batches.values()))
        return self._cost

    def seconds(self, flops: float, size_bytes: float, map_flops: float = 0.0) -> float | None:
        """What a batch is expected to take; None before anything was measured."""
        cost = self.cost
        return None if cost is None else cost.seconds(flops, size_bytes, map_flops)

    @property
    def r2(self) -> float | None:
        """R^2 over held-out batches: each is predicted by a fit of others. None with too few kinds to say.

        It is 1 less the squared errors' share of the squared differences from the mean.
        """
        batches = sorted(self._batches.values(), key=lambda batch: batch.seconds)
        if len(batches) <= max(_PARTS, _FEATURES):
            return None
        errors = 0.0
        for part in range(_PARTS):
            cost = self._fitted([batch for place, batch in enumerate(batches) if place % _PARTS != part])
            held_out = batches[part::_PARTS]
            errors += sum(_error(cost, each) ** 2 for each in held_out)
        mean_s = fmean(batch.seconds for batch in batches)
        spread = sum((batch.seconds - mean_s) ** 2 for batch in batches)
        return 1.0 - errors / spread if spread > 0.0 else None

    def _fitted(self, batches: Sequence[_Batch]) -> WorkCost:
        weights = [batch.weight_at(self._measured) for batch in batches]
        rows = [(batch.flops, batch.map_flops, batch.size_bytes, 1.0) for batch in batches]
        factors = _non_negative(rows, [batch.seconds for batch in batches], weights)
        per_flop_s, per_map_flop_s, per_byte_s, fixed_s = factors
        return WorkCost(per_flop_s=per_flop_s, per_map_flop_s=per_map_flop_s, per_byte_s=per_byte_s, fixed_s=fixed_s)


def _error(cost: WorkCost, batch: _Batch) -> float:
    return cost.seconds(batch.flops, batch.size_bytes, batch.map_flops) - batch.seconds


def _rounded(amount: float) -> int:
    return round(math.log1p(amount) / _KIND)


def _non_negative(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]
) -> tuple[float, ...]:
    """The factors of least weighted squared error, none negative.

    With so few columns all sets of columns are tried: in the best set the unbounded solution is not negative.
    """
    most_flops = max(max(row[:2]) for row in rows) or 1.0
    scales = [most_flops, most_flops, max(row[2] for row in rows) or 1.0, 1.0]
    gram = _gram(rows, targets, weights, scales)
    apart = _ONE_PACE * sum(weights)
    for column, other in ((0, 1), (1, 0)):
        gram[column][column] += apart
        gram[column][other] -= apart
    best, most = (0.0,) * _FEATURES, 0.0
    for count in range(1, _FEATURES + 1):
        for columns in combinations(range(_FEATURES), count):
            factors = _solved([[*(gram[i][j] for j in columns), gram[i][_FEATURES]] for i in columns])
            if factors is None or min(factors) < 0.0:
                continue
            # At a solution, what the squared targets lose of their sum.
            explained = sum(factor * gram[i][_FEATURES] for factor, i in zip(factors, columns, strict=True))
            if explained > most * (1.0 + 1e-12):
                by_column = dict(zip(columns, factors, strict=True))
                best = tuple(by_column.get(column, 0.0) / scales[column] for column in range(_FEATURES))
                most = explained
    return best


def _gram(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float], scales: Sequence[float]
) -> list[list[float]]:
    """Weighted products of columns, scaled to 1, with each other, and as the last ones with the targets."""
    columns = [[row[column] / scale for row in rows] for column, scale in enumerate(scales)]
    weighted = [[value * weight for value, weight in zip(column, weights, strict=True)] for column in columns]
    return [[sum(map(mul, left, right)) for right in (*columns, targets)] for left in weighted]


def _solved(matrix: list[list[float]]) -> list[float] | None:
    """Gauss and Jordan's elimination with pivots; matrix: with the right-hand side as its last column."""
    size = len(matrix)
    largest = max(abs(value) for row in matrix for value in row[:size])
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(matrix[row][column]))
        if abs(matrix[pivot][column]) <= 1e-9 * largest:
            return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        for row in range(size):
            if row != column:
                factor = matrix[row][column] / matrix[column][column]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[column], strict=True)]
    return [row[size] / row[place] for place, row in enumerate(matrix)]
