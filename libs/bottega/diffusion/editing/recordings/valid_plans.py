"""What one image computes, takes and completes of a recorded step, by where the template stands in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.editing.masked.tokens import share
from bottega.diffusion.editing.recordings.areas import whole_cells
from bottega.diffusion.editing.recordings.mask_levels import MaskLevels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidPlan:
    """What follows from a map of what is valid. The map is kept: plans are found by the tensor itself.

    computed: bool [height, width]; None computes all. missing: whole cells that this edit completes; None for none.
    """

    valid: Tensor
    computed: Tensor | None
    share: float
    missing: Tensor | None


class ValidPlans:
    """Those of one image, by the maps of the steps that it takes from.

    mask: what it redraws, dilated; bool [height, width] of the latent. completes: whether it may write.
    """

    def __init__(self, mask: Tensor, levels: MaskLevels, *, completes: bool) -> None:
        self._mask = mask
        self._levels = levels
        self._completes = completes
        self._plans: dict[int, ValidPlan] = {}

    def plan(self, valid: Tensor) -> ValidPlan:
        """What follows from a map, which was made once."""
        plan = self._plans.get(id(valid))
        if plan is None:
            plan = self._plans[id(valid)] = self._made(valid)
        return plan

    def _made(self, valid: Tensor) -> ValidPlan:
        computed = self._mask | ~valid
        # A cell of the deepest level has whole tokens of all levels in it, so that these are the template's alone.
        clean = whole_cells(~self._mask, self._levels.deepest)
        missing = clean & _cells_with(~valid, self._levels.deepest)
        return ValidPlan(
            valid=valid,
            computed=None if bool(computed.all()) else computed,
            share=share(computed, self._levels.finest),
            missing=missing if self._completes and bool(missing.any()) else None,
        )


def _cells_with(area: Tensor, cell: int) -> Tensor:
    """The cells of so many elements a side in which any element of an area is, bool [height, width]."""
    return torch.logical_not(whole_cells(~area, cell))
