"""Estimates the seconds of a network's blocks on this device, from finished forward passes or from a profile.

The seconds of a forward pass are a regression of its floating-point operations and bytes over recent ones. Convolutions
over feature maps run at another speed than attention and projections, so they are counted separately.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean
from weakref import WeakKeyDictionary

import numpy as np
from diffusers import ModelMixin
from torch import Tensor

from bottega.addons.edits.engine.activations import EditActivations, edit_activations
from bottega.addons.edits.engine.masked.tokens import MaskTokens, TokenCache
from bottega.addons.edits.engine.masked.work import BlockKind, BlockWork, blocks_of
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.model.rows import Row
from bottega.planning.cost import MAX_SHAPES
from bottega.v1.activations_pb2 import BlockProfile

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
# Columns that depend on each other have no solution: their matrix has a condition number above this.
_MOST_CONDITION = 1e9


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
    matrix = np.array(rows)
    scales = matrix.max(axis=0)
    scales[:2] = scales[:2].max()
    scales[scales == 0.0] = 1.0
    matrix = matrix / scales
    weighted = (matrix * np.array(weights)[:, None]).T
    gram, moments = weighted @ matrix, weighted @ np.array(targets)
    gram[:2, :2] += _ONE_PACE * sum(weights) * np.array([[1.0, -1.0], [-1.0, 1.0]])
    best, most = np.zeros(_FEATURES), 0.0
    for count in range(1, _FEATURES + 1):
        for columns in map(list, combinations(range(_FEATURES), count)):
            part = gram[np.ix_(columns, columns)]
            if not np.linalg.cond(part) < _MOST_CONDITION:
                continue
            factors = np.linalg.solve(part, moments[columns])
            # The reduction of the sum of squared targets at a solution.
            explained = factors @ moments[columns]
            if factors.min() >= 0.0 and explained > most * (1.0 + 1e-12):
                best, most = np.zeros(_FEATURES), explained
                best[columns] = factors
    return tuple(float(factor) for factor in best / scales)


Size = tuple[int, int]
"""Height and width of a latent."""

# Costs until the first turn is measured: about those of a CPU core. Only their ratios matter then.
_FIRST_COST = WorkCost(per_flop_s=1e-11, per_map_flop_s=1e-11, per_byte_s=1e-10, fixed_s=0.0)
# A larger factor means that the profile is from another kind of device, whose ratios do not apply here.
_MOST_CALIBRATION = 100.0


@dataclass(slots=True, kw_only=True)
class _Done:
    """The work of a forward pass."""

    flops: float = 0.0
    """Floating-point operations except for those over feature maps."""
    map_flops: float = 0.0
    """Floating-point operations over feature maps."""
    size_bytes: int = 0
    """Bytes read from recordings."""

    def add(self, block: BlockWork, flops: float) -> None:
        if block.kind is BlockKind.MAPS:
            self.map_flops += flops
        else:
            self.flops += flops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowWork:
    """The share of each block that a masked row computes."""

    shares: Sequence[float]
    """Share of the tokens or elements that is computed, for each block at its resolution; 1 computes all."""
    share: float
    saved: dict[frozenset[str], _Done] = field(default_factory=dict, repr=False)
    """The work that the last step saved by reusing recorded outputs, by the set of reused names."""


class BlockTimes:
    """Estimates how long each block takes for a row, for all of its tokens or only the masked ones."""

    def __init__(self, network: ModelMixin, *, sparse: bool) -> None:
        self.fit = WorkFit()
        """Regression of the seconds of whole forward passes."""
        self._network = network
        self.sparse = sparse
        self._maps = SparseMaps()
        self._tokens = TokenCache()
        self._blocks: dict[Size, tuple[BlockWork, ...]] = {}
        self._full: dict[Size, _Done] = {}
        self._works: WeakKeyDictionary[MaskTokens, RowWork] = WeakKeyDictionary()
        self._profiles: dict[Size, BlockProfile] = {}

    def blocks(self, size: Size) -> tuple[BlockWork, ...]:
        """Return the blocks that can be recorded, in order of execution."""
        if size not in self._blocks:
            if len(self._blocks) >= MAX_SHAPES:
                self._blocks.clear()
            self._blocks[size] = blocks_of(self._network, size, sparse=self.sparse)
            self._full[size] = full = _Done()
            for block in blocks_of(self._network, size):
                full.add(block, block.flops)
        return self._blocks[size]

    def shapes(self, size: Size) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of recorded outputs, by name."""
        blocks = self.blocks(size)
        return {name: shape for block in blocks for name, shape in zip(block.names, block.shapes, strict=True)}

    def use(self, size: Size, profile: BlockProfile) -> None:
        """Use a profile that was measured on this or a similar device. Ignore it if it lacks a block."""
        known = {block.name for block in self.blocks(size)}
        if known <= {block.name for block in profile.blocks} and len(profile.shares):
            self._profiles[size] = profile
            while len(self._profiles) > MAX_SHAPES:
                del self._profiles[next(iter(self._profiles))]

    def profile(self, size: Size) -> BlockProfile | None:
        """Return the profile in use for a latent size; None if there is none."""
        return self._profiles.get(size)

    def work(self, size: Size, computed: Tensor, share: float) -> RowWork:
        """Return the work of a masked row that computes the elements `computed`, bool [height, width] of the latent."""
        tokens = self._tokens.of(computed)
        known = self._works.get(tokens)
        if known is None:
            shares = [self._share(block, tokens) for block in self.blocks(size)]
            known = self._works[tokens] = RowWork(shares=shares, share=share)
        return known

    def full_s(self, size: Size) -> list[float]:
        """Return the seconds of each block for a row that computes all tokens."""
        profile = self._profiles.get(size)
        if profile is not None:
            scale, measured = self._calibration(size, profile), {each.name: each.full_s for each in profile.blocks}
            return [scale * measured[block.name] for block in self.blocks(size)]
        cost = self._cost
        return [_flops_s(cost, block, block.flops) for block in self.blocks(size)]

    def masked_s(self, size: Size, work: RowWork) -> list[float]:
        """Return the seconds of each block for a masked row, if all that it does not compute is in the recording."""
        profile = self._profiles.get(size)
        if profile is not None:
            scale, measured = self._calibration(size, profile), {each.name: each for each in profile.blocks}
            curves = (measured[block.name] for block in self.blocks(size))
            return [scale * _along(profile.shares, each.masked_s, each.full_s, work.share) for each in curves]
        cost = self._cost
        return [
            _flops_s(cost, block, block.flops_at(share)) + cost.per_byte_s * block.size_bytes
            for block, share in zip(self.blocks(size), work.shares, strict=True)
        ]

    def step_s(self, size: Size, rows: float) -> float | None:
        """Return the seconds of a step of `rows` rows that compute all tokens; None before anything was measured."""
        self.blocks(size)
        full = self._full[size]
        return self.fit.seconds(rows * full.flops, 0.0, rows * full.map_flops)

    def observe(self, rows: Sequence[Row], seconds: float) -> None:
        """Update the estimates from a forward pass, unless it recorded, because copying outputs takes time, too."""
        edits = [edit_activations(row.activations) for row in rows]
        if any(edit is not None and edit.sink is not None for edit in edits):
            return
        _, *size = rows[0].sample.shape
        latent = (size[0], size[1])
        done = _Done()
        for edit in edits:
            self._add(done, latent, edit)
        self.fit.observe(flops=done.flops, map_flops=done.map_flops, size_bytes=float(done.size_bytes), seconds=seconds)

    def _add(self, done: _Done, size: Size, edit: EditActivations | None) -> None:
        """Add the work of a row to that of a forward pass."""
        blocks = self.blocks(size)
        done.flops += self._full[size].flops
        done.map_flops += self._full[size].map_flops
        if edit is None or edit.computed is None or edit.recorded is None:
            return
        work, reused = self.work(size, edit.computed, edit.share), frozenset(edit.recorded.reused)
        saved = work.saved.get(reused)
        if saved is None:
            work.saved.clear()  # All steps of one edit are alike, except when loads came late.
            saved = work.saved[reused] = _Done()
            for block, share in zip(blocks, work.shares, strict=True):
                if reused.issuperset(block.names):
                    saved.add(block, block.flops - block.flops_at(share))
                    saved.size_bytes += block.size_bytes
        done.flops -= saved.flops
        done.map_flops -= saved.map_flops
        done.size_bytes += saved.size_bytes

    def _share(self, block: BlockWork, tokens: MaskTokens) -> float:
        if block.kind is BlockKind.MAPS:
            return self._maps.computed_share(tokens, block.size)
        level = tokens.at(*block.size)
        return level.count / level.total

    @property
    def _cost(self) -> WorkCost:
        cost = self.fit.cost
        if cost is None or min(cost.per_flop_s, cost.per_map_flop_s) > 0.0:
            return cost or _FIRST_COST
        # Whole rows of one size cannot separate the two kinds of operations: use one rate, which is right for such
        # rows.
        full = next(iter(self._full.values()), _Done())
        seconds = cost.seconds(full.flops, 0.0, full.map_flops)
        if seconds <= 0.0:
            return _FIRST_COST
        rate = seconds / (full.flops + full.map_flops)
        return replace(cost, per_flop_s=rate, per_map_flop_s=rate)

    def _calibration(self, size: Size, profile: BlockProfile) -> float:
        """Return the ratio of a row's time on this device to its time on the profile's device."""
        here_s = self.step_s(size, 1.0)
        if here_s is None or not profile.forward_s:
            return 1.0
        scale = here_s / profile.forward_s
        return scale if 1 / _MOST_CALIBRATION < scale < _MOST_CALIBRATION else 1.0


def _flops_s(cost: WorkCost, block: BlockWork, flops: float) -> float:
    return (cost.per_map_flop_s if block.kind is BlockKind.MAPS else cost.per_flop_s) * flops


def _along(shares: Sequence[float], masked_s: Sequence[float], full_s: float, share: float) -> float:
    """Interpolate between the measured shares and all tokens; below the lowest share, return its seconds."""
    points = [*zip(shares, masked_s, strict=False), (1.0, full_s)]
    place = bisect_left(points, (share, 0.0))
    if place == 0:
        return points[0][1]
    if place == len(points):
        return full_s
    (before, before_s), (after, after_s) = points[place - 1], points[place]
    return before_s + (after_s - before_s) * (share - before) / (after - before)
