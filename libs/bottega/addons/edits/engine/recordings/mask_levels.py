"""How masks map to tokens in a network."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bottega.addons.edits.engine.masked.tokens import dilate


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLevels:
    """Sizes that decide how a mask becomes tokens."""

    finest: int
    """Latent elements a side of a token at the finest attention level."""
    deepest: int
    """Latent elements a side of a token at the deepest level."""
    margin: int
    """Tokens around the mask, at the finest level, that are computed as well."""
    blocks: frozenset[str]
    """Names of the transformer blocks' outputs."""

    def dilated(self, mask: Tensor) -> Tensor:
        """Return the area that an edit computes, bool [height, width], from its mask [1, 1, height, width]."""
        return dilate(mask[0, 0].cpu() > 0, self.margin, self.finest)
