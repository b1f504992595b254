"""What every kernel's file says of itself to its bench and its tests: sizes, both ways to compute, bytes and FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Of one value, as a share of the largest in the exact result: each rounds its result once, and a product's terms may be
# summed in another order. Eight times half the spacing of a type's numbers at 1.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One size of one kernel.

    kernel, reference: compute the same from the same inputs, as often as they are called; what is written in place is
    returned as well. exact: the reference in float64. moved_bytes: read and written once, at the least.
    flops: of the arithmetic; 0 where only bytes count.
    """

    name: str
    kernel: Callable[[], Sequence[Tensor]]
    reference: Callable[[], Sequence[Tensor]]
    exact: Callable[[], Sequence[Tensor]]
    moved_bytes: int
    flops: int = 0


def difference(made: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest |made - exact| as a share of the largest |exact|, of the worst tensor; NaN where there is one."""
    worst = 0.0
    for each, true in zip(made, exact, strict=True):
        apart = (each.double() - true.double()).abs().max().item()
        share = apart / max(true.double().abs().max().item(), 1e-30)
        if share != share:
            return share
        worst = max(worst, share)
    return worst
