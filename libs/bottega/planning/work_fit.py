"""Seconds as a function of floating-point operations and bytes: a regression over batches that ran, kept fresh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
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
_FEATURES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCost:
    """seconds = per_flop_s * flops + per_byte_s * size_bytes + fixed_s; none is negative."""

    per_flop_s: float
    per_byte_s: float
    fixed_s: float

    def seconds(self, flops: float, size_bytes: float) -> float:
        """Of a batch."""
        return self.per_flop_s * flops + self.per_byte_s * size_bytes + self.fixed_s


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A kind of batches: what its last one had, its mean seconds, and at which measurement it was measured last."""

    flops: float
    size_bytes: float
    seconds: float
    measured_at: int


class WorkFit:
    """A least-squares fit without negative parts, over the kinds of batches measured so far; old ones count less.

    A kind is what has about the same operations and bytes: however often one runs, others are not forgotten for it. So
    what repeats itself moves the fit to what the machine does now, and what ran before says how it grows. Of more than
    MAX_BATCHES kinds, that which ran longest ago is forgotten.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._measured = 0
        self._cost: WorkCost | None = None

    def observe(self, *, flops: float, size_bytes: float, seconds: float) -> None:
        """Takes in a batch that ran. What is not finite, or took no time, changes nothing."""
        if not (math.isfinite(flops + size_bytes + seconds) and min(flops, size_bytes) >= 0.0 < seconds):
            return
        self._measured += 1
        self._cost = None
        kind = _rounded(flops), _rounded(size_bytes)
        known = self._batches.pop(kind, None)  # the last one is the newest
        mean_s = seconds if known is None else known.seconds + _WEIGHT * (seconds - known.seconds)
        self._batches[kind] = _Batch(flops=flops, size_bytes=size_bytes, seconds=mean_s, measured_at=self._measured)
        if len(self._batches) > MAX_BATCHES:
            del self._batches[next(iter(self._batches))]

    @property
    def cost(self) -> WorkCost | None:
        """The fit; None before anything was measured."""
        if self._cost is None and self._batches:
            self._cost = self._fitted(list(self._batches.values()))
        return self._cost

    def seconds(self, flops: float, size_bytes: float) -> float | None:
        """What a batch is expected to take; None before anything was measured."""
        cost = self.cost
        return None if cost is None else cost.seconds(flops, size_bytes)

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
            errors += sum((cost.seconds(each.flops, each.size_bytes) - each.seconds) ** 2 for each in held_out)
        mean_s = fmean(batch.seconds for batch in batches)
        spread = sum((batch.seconds - mean_s) ** 2 for batch in batches)
        return 1.0 - errors / spread if spread > 0.0 else None

    def _fitted(self, batches: Sequence[_Batch]) -> WorkCost:
        weights = [2.0 ** ((batch.measured_at - self._measured) / _HALF_LIFE) for batch in batches]
        rows = [(batch.flops, batch.size_bytes, 1.0) for batch in batches]
        per_flop_s, per_byte_s, fixed_s = _non_negative(rows, [batch.seconds for batch in batches], weights)
        return WorkCost(per_flop_s=per_flop_s, per_byte_s=per_byte_s, fixed_s=fixed_s)


def _rounded(amount: float) -> int:
    return round(math.log1p(amount) / _KIND)


def _non_negative(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float]
) -> tuple[float, ...]:
    """The factors of least weighted squared error, none negative.

    With so few columns all sets of columns are tried: in the best set the unbounded solution is not negative.
    """
    scales = [max(abs(row[column]) for row in rows) or 1.0 for column in range(_FEATURES)]
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    best, least = (0.0,) * _FEATURES, math.inf
    for count in range(1, _FEATURES + 1):
        for columns in combinations(range(_FEATURES), count):
            factors = _least_squares(scaled, targets, weights, columns)
            if factors is None or min(factors) < 0.0:
                continue
            error = sum(
                weight * (sum(f * row[column] for f, column in zip(factors, columns, strict=True)) - target) ** 2
                for row, target, weight in zip(scaled, targets, weights, strict=True)
            )
            if error < least * (1.0 - 1e-12):
                by_column = dict(zip(columns, factors, strict=True))
                best = tuple(by_column.get(column, 0.0) / scales[column] for column in range(_FEATURES))
                least = error
    return best


def _least_squares(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float], columns: Sequence[int]
) -> list[float] | None:
    """By the normal equations; None where the columns do not tell their parts apart."""
    matrix = [
        [
            *(sum(weight * row[i] * row[j] for row, weight in zip(rows, weights, strict=True)) for j in columns),
            sum(weight * row[i] * target for row, target, weight in zip(rows, targets, weights, strict=True)),
        ]
        for i in columns
    ]
    return _solved(matrix)


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
