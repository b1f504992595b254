"""Which areas one image computes, reuses and completes, given where a recorded step is valid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.diffusion.editing.masked.tokens import share
from bottega.diffusion.editing.recordings.areas import whole_cells
from bottega.diffusion.editing.recordings.mask_levels import MaskLevels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ValidPlan:
    """The areas that follow from one map of valid elements."""

    valid: Tensor
    """The map. Kept because plans are found by the identity of this tensor."""
    computed: Tensor | None
    """Elements to compute, bool [height, width]; None for all."""
    share: float
    missing: Tensor | None
    """Whole cells that this edit adds to the recording; None for none."""


class ValidPlans:
    """The plans of one image, by map of valid elements. `mask` is dilated, bool [height, width] of the latent."""

    def __init__(self, mask: Tensor, levels: MaskLevels, *, completes: bool) -> None:
        self._mask = mask
        self._levels = levels
        self._completes = completes
        self._plans: dict[int, ValidPlan] = {}

    def plan(self, valid: Tensor) -> ValidPlan:
        """Return the plan for a map; it is made once."""
        plan = self._plans.get(id(valid))
        if plan is None:
            plan = self._plans[id(valid)] = self._made(valid)
        return plan

    def _made(self, valid: Tensor) -> ValidPlan:
        computed = self._mask | ~valid
        # A cell of the deepest level consists of whole tokens of all levels, so these tokens lie wholly outside the
        # mask.
        clean = whole_cells(~self._mask, self._levels.deepest)
        missing = clean & _cells_with(~valid, self._levels.deepest)
        return ValidPlan(
            valid=valid,
            computed=None if bool(computed.all()) else computed,
            share=share(computed, self._levels.finest),
            missing=missing if self._completes and bool(missing.any()) else None,
        )


def _cells_with(area: Tensor, cell: int) -> Tensor:
    """Return the cells of `cell` elements a side that contain any element of an area, bool [height, width]."""
    return torch.logical_not(whole_cells(~area, cell))
