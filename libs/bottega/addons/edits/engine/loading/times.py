"""Estimates the seconds of a network's blocks on this device, from finished forward passes or from a profile."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from diffusers import UNet2DConditionModel
from torch import Tensor

from bottega.addons.edits.engine.activations import EditActivations, edit_activations
from bottega.addons.edits.engine.loading.work_fit import WorkCost, WorkFit
from bottega.addons.edits.engine.masked.tokens import MaskTokens, TokenCache
from bottega.addons.edits.engine.masked.work import BlockKind, BlockWork, blocks_of
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.model.rows import Row
from bottega.planning.cost import MAX_SHAPES
from bottega.v1.activations_pb2 import BlockProfile

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

    def __init__(self, unet: UNet2DConditionModel, *, sparse: bool) -> None:
        self.fit = WorkFit()
        """Regression of the seconds of whole forward passes."""
        self._unet = unet
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
            self._blocks[size] = blocks_of(self._unet, size, sparse=self.sparse)
            self._full[size] = full = _Done()
            for block in blocks_of(self._unet, size):
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
