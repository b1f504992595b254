"""Computes which tokens are computed at each resolution of a network, from a map of a latent's computed elements.

A map is bool [height, width] at latent size. The module knows neither packing nor a network's blocks.
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
    """The computed tokens of one map at one resolution."""

    mask: Tensor
    """bool [height, width], on the CPU."""
    index: Tensor
    """int64 [count], row-major and ascending, on the CPU."""

    @property
    def count(self) -> int:
        return len(self.index)

    @functools.cached_property
    def bits(self) -> int:
        """Return the mask as an integer whose highest bit is the first token, for comparisons without tensors."""
        return int.from_bytes(np.packbits(self.mask.numpy()).tobytes())

    @property
    def total(self) -> int:
        """Number of tokens of the whole picture."""
        return self.mask.numel()


class MaskTokens:
    """The token sets of one map, by resolution. A token is computed if any latent element under it is."""

    def __init__(self, computed: Tensor) -> None:
        # Copied once per mask, because this waits for the GPU.
        self._mask = computed.detach().to("cpu").bool()
        self._sets: dict[tuple[int, int], TokenSet] = {}
        self.full = bool(self._mask.all())

    def at(self, height: int, width: int) -> TokenSet:
        """Return the set for a feature map of this size. Raise ValueError if halving the latent never gives it."""
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
    """The token sets of the maps in use, found by the identity of their tensors, which must not be written to."""

    def __init__(self) -> None:
        self._known: MutableMapping[Tensor, MaskTokens] = WeakIdKeyDictionary()

    def of(self, computed: Tensor) -> MaskTokens:
        tokens = self._known.get(computed)
        if tokens is None:
            tokens = self._known[computed] = MaskTokens(computed)
        return tokens


def finest_stride(unet: UNet2DConditionModel) -> int:
    """Return the side length, in latent elements, of a token at the finest attention level; 1 without attention."""
    levels = [level for level, block in enumerate(unet.down_blocks) if getattr(block, "has_cross_attention", False)]
    if getattr(unet.mid_block, "has_cross_attention", False):
        levels.append(len(unet.down_blocks) - 1)
    return 1 << min(levels, default=0)


def dilate(mask: Tensor, margin: int, stride: int) -> Tensor:
    """Return a mask with a margin of `margin` tokens, each of `stride` latent elements, bool [height, width]."""
    height, width = mask.shape
    tokens = _pooled(mask, stride)[None].float()
    grown = functional.max_pool2d(tokens, 2 * margin + 1, stride=1, padding=margin)[0] > 0
    return grown.repeat_interleave(stride, 0).repeat_interleave(stride, 1)[:height, :width].contiguous()


def share(computed: Tensor, stride: int) -> float:
    """Return the share of tokens that a map computes, for tokens with a side of `stride` latent elements."""
    return float(_pooled(computed, stride).float().mean())


def _pooled(mask: Tensor, stride: int) -> Tensor:
    """Return for each token whether any element under it is set. Rounds up, as padded downsampling convolutions do."""
    return functional.max_pool2d(mask[None].float(), stride, ceil_mode=True)[0] > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskLevels:
    """Sizes that decide which tokens a mask needs."""

    finest: int
    """Side length, in latent elements, of a token at the finest attention level."""
    deepest: int
    """Side length, in latent elements, of a token at the deepest level."""
    margin: int
    """Width of the margin around the mask that is computed too, in tokens of the finest attention level."""
    blocks: frozenset[str]
    """Names of the outputs of transformer blocks."""

    def dilated(self, mask: Tensor) -> Tensor:
        """Return the area that an edit computes, bool [height, width], for its mask [1, 1, height, width]."""
        return dilate(mask[0, 0].cpu() > 0, self.margin, self.finest)
