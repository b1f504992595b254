"""Areas of a latent: the levels of a network at which they are seen, and the whole cells in them."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def level_of(shape: tuple[int, ...], tokens: int) -> tuple[int, int]:
    """Height and width of the level of a latent of this shape that has so many tokens. Raises ValueError."""
    height, width = shape[-2:]
    while height * width > tokens:
        height, width = -(-height // 2), -(-width // 2)
    if height * width != tokens:
        raise ValueError(f"a latent of {tuple(shape)} has no level of {tokens} tokens")
    return height, width


def whole_cells(area: Tensor, cell: int) -> Tensor:
    """What of an area, bool [height, width], is made of whole cells of so many elements a side."""
    outside = functional.max_pool2d((~area)[None].float(), cell, ceil_mode=True)[0] > 0
    height, width = area.shape
    return ~outside.repeat_interleave(cell, 0).repeat_interleave(cell, 1)[:height, :width]
