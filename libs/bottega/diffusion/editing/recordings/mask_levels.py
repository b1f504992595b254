"""How masks become tokens in one network. Knows no request and no recording."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bottega.diffusion.editing.masked.tokens import dilate


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLevels:
    """How masks become tokens in a network.

    finest: latent elements a side of a token at its finest level of attention. deepest: of one at its deepest level.
    margin: tokens of the finest level around a mask that are computed, too.
    blocks: names of what its transformer blocks put out.
    """

    finest: int
    deepest: int
    margin: int
    blocks: frozenset[str]

    def dilated(self, mask: Tensor) -> Tensor:
        """What an edit computes. mask: [1, 1, height, width] of the latent, 1 where it is redrawn; returns bool."""
        return dilate(mask[0, 0].cpu() > 0, self.margin, self.finest)
