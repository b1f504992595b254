"""Operations of the engine that an acceleration may replace.

Each is None at first, and the code that uses it then computes the plain way. A replacement computes the same, and is
set only between turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bottega.model.backbone import Backbone
from bottega.model.rows import Factors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightSum:
    """The assignment weight = before + up @ down, rounded once."""

    weight: Tensor
    """Written in place."""
    before: Tensor
    """In the shape of `weight`. May be `weight` itself, and may be on the host if `weight` is not."""
    factors: Factors


class SumWriter(Protocol):
    """Patches LoRAs into weights."""

    def __call__(self, sums: Iterable[WeightSum]) -> None:
        """Write each sum once. Iterating may copy weights, and raise an error if there is no memory for that."""
        ...


class Moves(Protocol):
    """Moves the tokens and tiles that masked rows compute out of whole tensors, and back."""

    def pack(self, whole: Tensor, index: Tensor) -> Tensor:
        """Return the items [items, channels] at these places, int64 [items], of [rows, tokens, channels]."""
        ...

    def merge(
        self, items: Tensor, index: Tensor, slots: Tensor, recorded: Sequence[Tensor | None], tokens: int
    ) -> Tensor:
        """Return [rows, tokens, channels], made of computed items and recorded tokens.

        Args:
            items: Computed tokens, [items, channels].
            index: Place of each item, int64 [items].
            slots: Item of each place, int32 [rows * tokens]; -1 for places that take recorded tokens.
            recorded: See `Packing.merge`.
            tokens: Number of tokens of each row.
        """
        ...

    def cut(
        self, parts: Sequence[Tensor], rows: Sequence[int], corners: Sequence[tuple[int, int]], shape: tuple[int, int]
    ) -> Tensor:
        """Return windows of feature maps; see sparse.pieces.windows."""
        ...

    def paste(self, whole: Tensor, tiles: Tensor, rows: Sequence[int], corners: Sequence[tuple[int, int]]) -> None:
        """Write tiles into feature maps, each into its row, from its top and left on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EulerStep:
    """A step of Euler's method from one noise level to the next."""

    sigma: float
    next_sigma: float
    velocity: bool
    """Whether the model predicts velocity rather than noise."""


class GuidedEuler(Protocol):
    """Applies guidance and a step of Euler's method at once."""

    def __call__(
        self, conditional: Tensor, unconditional: Tensor | None, latent: Tensor, *, scale: float, step: EulerStep
    ) -> tuple[Tensor, Tensor]:
        """Return the next latent, and the estimate of the finished one. All are [1, channels, height, width].

        Args:
            conditional: Prediction for the conditional row.
            unconditional: Prediction for the unconditional row; None without guidance.
            latent: The latent before the step.
            scale: Guidance scale.
            step: The step.
        """
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class Operations:
    """The replaced operations of one model; None computes the plain way."""

    backbone: Backbone | None = None
    """Runs groups that no add-on's backbone runs, instead of the model's own one."""
    write_sums: SumWriter | None = None
    moves: Moves | None = None
    guided_euler: GuidedEuler | None = None
    rounds_weights: bool = False
    """Whether the network's weights are rounded, so that its pictures are not exact and LoRAs are not merged."""


def as_matrix(tensor: Tensor) -> Tensor:
    """Return a view of a tensor in a weight's shape as [first dimension, all others], in the order of its memory."""
    if tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        return tensor.permute(0, 2, 3, 1).flatten(1)
    return tensor.view(tensor.shape[0], -1)


def down_matrix(weight_sum: WeightSum) -> Tensor:
    """Return the factors' `down` as [rank, columns], with the columns in the order of `as_matrix` of the weight."""
    down, weight = weight_sum.factors.down, weight_sum.weight
    return down.flatten(1) if weight.is_contiguous() else down.permute(0, 2, 3, 1).flatten(1)
