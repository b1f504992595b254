"""Estimates the seconds of a batch from floating-point operations and bytes: a regression over recent batches.

Convolutions over feature maps run at another speed than attention and projections, so they are counted separately.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from operator import mul
from statistics import fmean

MAX_BATCHES = 256
"""Maximum number of kinds of batches to fit."""

# Batches whose operations and bytes differ by less than this are of one kind.
_KIND = 0.02
# Weight of a new measurement of a kind: a short disturbance is forgotten in a few turns.
_WEIGHT = 0.25
# Measurements of any kind after which one counts half, because the machine may have changed.
_HALF_LIFE = 200
# Kinds are divided into this many parts, each of which is held out once.
_PARTS = 5
_FEATURES = 4
# How strongly, as a share of all measurements, the two speeds of operations are kept equal. It decides as long as the
# measurements do not tell them apart.
_ONE_PACE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCost:
    """seconds = per_flop_s * flops + per_map_flop_s * map_flops + per_byte_s * size_bytes + fixed_s; none is negative.

    `map_flops` are those of convolutions over feature maps, `flops` all others.
    """

    per_flop_s: float
    per_map_flop_s: float
    per_byte_s: float
    fixed_s: float

    def seconds(self, flops: float, size_bytes: float, map_flops: float = 0.0) -> float:
        """Return the seconds of a batch."""
        computed_s = self.per_flop_s * flops + self.per_map_flop_s * map_flops
        return computed_s + self.per_byte_s * size_bytes + self.fixed_s


@dataclass(slots=True, kw_only=True)
class _Batch:
    """A kind of batch: the work of the last one, and the mean seconds of all."""

    flops: float
    map_flops: float
    size_bytes: float
    seconds: float
    weight: float
    """Number of measurements, where older ones count less, at the time of the last one."""
    measured_at: int
    """Sequence number of the last measurement among those of all kinds."""

    def weight_at(self, measured: int) -> float:
        """Return the weight after `measured` measurements of all kinds, which makes it decay."""
        return self.weight * math.exp2((self.measured_at - measured) / _HALF_LIFE)


class WorkFit:
    """A non-negative least-squares fit over the kinds of batches that were measured; old measurements count less.

    Batches of a kind have about the same operations and bytes. A kind is kept however often others run: frequent kinds
    move the fit to the machine's current speed, and rare ones show how time grows with work. Of more than MAX_BATCHES
    kinds, the one that ran longest ago is dropped.
    """

    def __init__(self) -> None:
        self._batches: dict[tuple[int, ...], _Batch] = {}
        self._measured = 0
        self._cost: WorkCost | None = None

    def observe(self, *, flops: float, size_bytes: float, seconds: float, map_flops: float = 0.0) -> None:
        """Record a batch that ran; see WorkCost.

        A batch with a value that is not finite, or with 0 seconds, is ignored.
        """
        work = flops, map_flops, size_bytes
        if not (math.isfinite(sum(work) + seconds) and min(work) >= 0.0 < seconds):
            return
        self._measured += 1
        self._cost = None
        kind = tuple(map(_rounded, work))
        known = self._batches.pop(kind, None)  # dictionary order: the newest is last
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
        """Return the expected seconds of a batch; None before anything was measured."""
        cost = self.cost
        return None if cost is None else cost.seconds(flops, size_bytes, map_flops)

    @property
    def r2(self) -> float | None:
        """Coefficient of determination over batches, each predicted by a fit of the others; None with too few kinds.

        It is 1 minus the ratio of the squared errors to the squared differences from the mean.
        """
        batches = sorted(self._batches.values(), key=lambda batch: batch.seconds)
        if len(batches) <= max(_PARTS, _FEATURES):
            return None
        errors = 0.0
        for part in range(_PARTS):
            cost = self._fitted([batch for place, batch in enumerate(batches) if place % _PARTS != part])
            held_out = batches[part::_PARTS]
            errors += sum(_error(cost, batch) ** 2 for batch in held_out)
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
    """Return the non-negative factors with the least weighted squared error.

    There are few columns, so all subsets of columns are tried. For the best subset, the unconstrained solution is
    non-negative.
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
            # The reduction of the sum of squared targets at a solution.
            explained = sum(factor * gram[i][_FEATURES] for factor, i in zip(factors, columns, strict=True))
            if explained > most * (1.0 + 1e-12):
                by_column = dict(zip(columns, factors, strict=True))
                best = tuple(by_column.get(column, 0.0) / scales[column] for column in range(_FEATURES))
                most = explained
    return best


def _gram(
    rows: Sequence[Sequence[float]], targets: Sequence[float], weights: Sequence[float], scales: Sequence[float]
) -> list[list[float]]:
    """Return the weighted products of the scaled columns with each other, and with the targets as the last column."""
    columns = [[row[column] / scale for row in rows] for column, scale in enumerate(scales)]
    weighted = [[value * weight for value, weight in zip(column, weights, strict=True)] for column in columns]
    return [[sum(map(mul, left, right)) for right in (*columns, targets)] for left in weighted]


def _solved(matrix: list[list[float]]) -> list[float] | None:
    """Return the solution of a linear system; None if it is singular (Gauss-Jordan elimination with pivots).

    Args:
        matrix: The coefficients, with the right-hand side as the last column. It is overwritten.
    """
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
