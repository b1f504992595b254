"""Areas of a latent at the levels of a network."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def level_of(shape: tuple[int, ...], tokens: int) -> tuple[int, int]:
    """Return the size of the level of a latent that has this number of tokens. Raise ValueError if there is none."""
    height, width = shape[-2:]
    while height * width > tokens:
        height, width = -(-height // 2), -(-width // 2)
    if height * width != tokens:
        raise ValueError(f"a latent of {tuple(shape)} has no level of {tokens} tokens")
    return height, width


def whole_cells(area: Tensor, cell: int) -> Tensor:
    """Return the part of an area, bool [height, width], that consists of whole cells of `cell` elements a side."""
    outside = functional.max_pool2d((~area)[None].float(), cell, ceil_mode=True)[0] > 0
    height, width = area.shape
    return ~outside.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[:height, :width]
