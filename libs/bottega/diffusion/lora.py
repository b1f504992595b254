"""A LoRA as the engine takes it: its layers in their canonical form, and how strongly a request uses it.

Knows no files and no network: where the layers come from, and how they are added, is others' matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraLayer:
    """What one module gets: scale * up(down(x)).

    down: [rank, in] or, for a convolution, [rank, in, kernel, kernel]; up: [out, rank] or
    [out, rank, 1, 1]. scale: alpha / rank of this module.
    """

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraUse:
    """A LoRA at a strength. layers: by module path below the backbone's network."""

    name: str
    layers: Mapping[str, LoraLayer]
    scale: float
