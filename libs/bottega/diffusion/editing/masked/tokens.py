"""Which tokens are computed at each resolution of a network, from a map of a latent's computed elements.

It knows neither packing nor a network's blocks. A map is bool [height, width] at latent size.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np
from diffusers import UNet2DConditionModel
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """The computed tokens of one map at one resolution.

    mask: bool [height, width], on the CPU. index: int64 [count], row-major and ascending, on the CPU.
    """

    mask: Tensor
    index: Tensor

    @property
    def count(self) -> int:
        """How many are computed."""
        return len(self.index)

    @functools.cached_property
    def bits(self) -> int:
        """The mask as a number, its first token being the highest bit: for comparisons that take no tensor."""
        return int.from_bytes(np.packbits(self.mask.numpy()).tobytes())

    @property
    def total(self) -> int:
        """Of the whole picture."""
        return self.mask.numel()


class MaskTokens:
    """The token sets of one map. A token is computed where any latent element under it is, so sets are nested."""

    def __init__(self, computed: Tensor) -> None:
        # Once for a mask: it is here that a GPU is waited for.
        self._mask = computed.detach().to("cpu").bool()
        self._sets: dict[tuple[int, int], TokenSet] = {}
        self.full = bool(self._mask.all())

    def at(self, height: int, width: int) -> TokenSet:
        """The set of a feature map of this size. Raises ValueError where halving the latent never leads there."""
        known = self._sets.get((height, width))
        if known is None:
            mask = self._mask
            while mask.shape != (height, width):
                if mask.shape[0] < height or mask.shape[1] < width or mask.numel() == 1:
                    raise ValueError(f"a latent of {tuple(self._mask.shape)} has no level of {(height, width)}")
                mask = _pooled(mask, 2)
            known = self._sets[height, width] = TokenSet(mask=mask, index=mask.flatten().nonzero()[:, 0])
        return known


class TokenCache:
    """The token sets of the maps in use, by their tensors, which nobody may write to: they live as long as those."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, MaskTokens] = WeakIdKeyDictionary()

    def of(self, computed: Tensor) -> MaskTokens:
        """Of this map."""
        tokens = self._known.get(computed)
        if tokens is None:
            tokens = self._known[computed] = MaskTokens(computed)
        return tokens


def finest_stride(unet: UNet2DConditionModel) -> int:
    """Latent elements a side of a token of the finest attention level; 1 where nothing attends."""
    levels = [level for level, block in enumerate(unet.down_blocks) if getattr(block, "has_cross_attention", False)]
    if getattr(unet.mid_block, "has_cross_attention", False):
        levels.append(len(unet.down_blocks) - 1)
    return 1 << min(levels, default=0)


def dilate(mask: Tensor, margin: int, stride: int) -> Tensor:
    """The map that computes all of a mask, and so many tokens around it.

    mask: bool [height, width]. margin: in tokens of `stride` latent elements a side; what comes back is made of
    whole ones.
    """
    height, width = mask.shape
    tokens = _pooled(mask, stride)[None].float()
    grown = functional.max_pool2d(tokens, 2 * margin + 1, stride=1, padding=margin)[0] > 0
    return grown.repeat_interleave(stride, 0).repeat_interleave(stride, 1)[:height, :width].contiguous()


def share(computed: Tensor, stride: int) -> float:
    """The share of tokens that a map computes, at the level of `stride` latent elements a token."""
    return float(_pooled(computed, stride).float().mean())


def _pooled(mask: Tensor, stride: int) -> Tensor:
    """Whether any element under a token is set. Rounds up, as downsampling convolutions with padding do."""
    return functional.max_pool2d(mask[None].float(), stride, ceil_mode=True)[0] > 0
