"""What the engine computes by functions that an acceleration may put others in place of.

Each slot is empty at first: who uses it computes the plain way then, which stands beside it. What is put in computes
the same; it is changed between two turns alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.diffusion.model.backbone import Backbone
from bottega.diffusion.rows import Factors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSum:
    """weight = before + up @ down, rounded once; written in place. before: of its shape; may be the weight itself, and
    may lie on the host where the weight does not."""

    weight: Tensor
    before: Tensor
    factors: Factors


class SumWriter(Protocol):
    """Puts LoRAs into weights."""

    def __call__(self, sums: Iterable[WeightSum]) -> None:
        """Each weight once. Iterating may copy weights, and raise where there is no memory for that."""
        ...


class Moves(Protocol):
    """What masked rows compute, taken out of whole tensors and put back."""

    def pack(self, whole: Tensor, index: Tensor) -> Tensor:
        """The items [items, channels] at these places of [rows, tokens, channels]; index: int64 [items]."""
        ...

    def merge(
        self, items: Tensor, index: Tensor, slots: Tensor, recorded: Sequence[Tensor | None], tokens: int
    ) -> Tensor:
        """[rows, tokens, channels] of items and, at the other places, what was recorded.

        slots: int32 [rows * tokens], the item of each place, -1 where it has none. recorded: see Packing.merge.
        """
        ...

    def cut(
        self, parts: Sequence[Tensor], rows: Sequence[int], corners: Sequence[tuple[int, int]], shape: tuple[int, int]
    ) -> Tensor:
        """Windows of feature maps, see sparse.pieces.windows."""
        ...

    def paste(self, whole: Tensor, tiles: Tensor, rows: Sequence[int], corners: Sequence[tuple[int, int]]) -> None:
        """Writes tiles that lie in the picture to feature maps, each to its row, from its top and left on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EulerStep:
    """A step of Euler's method from one noise level to the next. velocity: what the model predicts; else noise."""

    sigma: float
    next_sigma: float
    velocity: bool


class GuidedEuler(Protocol):
    """Guidance and a step of Euler's method at once."""

    def __call__(
        self, conditional: Tensor, unconditional: Tensor | None, latent: Tensor, *, scale: float, step: EulerStep
    ) -> tuple[Tensor, Tensor]:
        """The next latent, and the estimate of the finished one; all [1, channels, height, width].

        unconditional: None without guidance. scale: of guidance.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Operations:
    """Of one model. None: the plain way. backbone: computes groups without masked rows in the place of the model's."""

    backbone: Backbone | None = None
    write_sums: SumWriter | None = None
    moves: Moves | None = None
    guided_euler: GuidedEuler | None = None
